#include "phalanx/parallel/fsdp/fully_shard.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/base/name_patterns.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/fsdp/find_units.h"
#include "phalanx/parallel/fsdp/fsdp_runtime.h"
#include "phalanx/parallel/replicate.h"

namespace phalanx {
namespace {

constexpr const char* kShardAxis = "dp_shard";
constexpr const char* kShardAxisWithContext = "dp_shard_cp";  // its inner part are ranks of context parallelism
constexpr const char* kReplicateAxis = "dp_replicate";
constexpr std::size_t kBroadcastBytes = 25 << 20;

const char* shard_axis(const DeviceMesh& mesh) {
  return mesh.has(kShardAxisWithContext) ? kShardAxisWithContext : kShardAxis;
}

/// The names of the parameters of the group.
std::set<std::string> own_group_names(const std::optional<OwnShardGroup>& group, const std::vector<NamedTensor>& all) {
  std::set<std::string> result;
  if (!group) return result;
  std::vector<std::string> names;
  for (const NamedTensor& one : all) names.push_back(one.name);
  const std::vector<bool> matches = matching_names("fully_shard: own_group", group->patterns, names);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (matches[i]) result.insert(names[i]);
  }
  return result;
}

/// Whether the unit is of the group.
bool is_of_group(const fsdp::ParamGroupPlan& plan, const std::set<std::string>& names) {
  const auto inside =
      std::ranges::count_if(plan.parameters, [&](const NamedTensor& one) { return names.contains(one.name); });
  if (inside == 0) return false;
  if (static_cast<std::size_t>(inside) == plan.parameters.size()) return true;
  throw ConfigError(
      fmt::format("fully_shard: own_group has {} of the {} parameters of unit '{}': expected all or none; make them "
                  "units of their own",
                  inside, plan.parameters.size(), plan.name));
}

void check_options(const DeviceMesh& mesh, const FullyShardOptions& options) {
  if (!mesh.has(shard_axis(mesh))) {
    throw ConfigError(
        fmt::format("fully_shard: {} has no axis '{}': make one, of one rank if need be", mesh.text(), kShardAxis));
  }
  if (options.stage < 1 || options.stage > 3) {
    throw ConfigError(fmt::format("fully_shard: stage is {}: expected 1, 2 or 3", options.stage));
  }
  if (options.gradient_reduction != ReduceOp::avg && options.gradient_reduction != ReduceOp::sum) {
    throw ConfigError("fully_shard: gradient_reduction: expected ReduceOp::avg or ReduceOp::sum");
  }
  if (options.own_group && options.gradient_reduction != ReduceOp::sum) {
    throw ConfigError("fully_shard: own_group: gradient_reduction: expected ReduceOp::sum");
  }
  const int group = options.reshard_group, ranks = mesh.size(shard_axis(mesh));
  if (group != 0 && (options.stage < 3 || !options.reshard_after_forward)) {
    throw ConfigError(
        fmt::format("fully_shard: reshard_group is {}, but with stage = {} and reshard_after_forward = {} units stay "
                    "whole; expected stage 3 and true",
                    group, options.stage, options.reshard_after_forward));
  }
  if (group < 0 || (group > 0 && ranks % group != 0)) {
    throw ConfigError(fmt::format("fully_shard: reshard_group is {}: expected a divisor of the {} ranks along '{}'",
                                  group, ranks, shard_axis(mesh)));
  }
  for (const auto& [name, dtype] :
       {std::pair{"param_dtype", options.param_dtype}, std::pair{"reduce_dtype", options.reduce_dtype},
        std::pair{"output_dtype", options.output_dtype}}) {
    if (!dtype || *dtype == at::kFloat || *dtype == at::kBFloat16 || *dtype == at::kHalf || *dtype == at::kDouble) {
      continue;
    }
    throw ConfigError(
        fmt::format("fully_shard: {} is {}: expected Float, BFloat16, Half or Double", name, c10::toString(*dtype)));
  }
}

at::Tensor in_dtype(const at::Tensor& tensor, std::optional<at::ScalarType> dtype) {
  const bool changes = dtype && tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != *dtype;
  return changes ? tensor.to(*dtype) : tensor;
}

std::string text_of(std::optional<at::ScalarType> dtype) { return dtype ? c10::toString(*dtype) : "unset"; }

/// Copies the values of the mesh's first rank to all ranks. Parameters without memory have none.
void broadcast_parameters(const std::vector<NamedTensor>& all, Communicator& comm, Communicator* replicas) {
  std::vector<NamedTensor> present;
  for (const auto& named : all) {
    if (has_memory(named.tensor)) present.push_back(named);
  }
  if (replicas != nullptr) broadcast_coalesced(*replicas, present, kBroadcastBytes);
  broadcast_coalesced(comm, present, kBroadcastBytes);
}

fsdp::ForwardHooks make_forward_hooks(fsdp::FsdpRuntime& units, std::size_t unit, std::optional<at::ScalarType> dtype) {
  const std::weak_ptr<fsdp::FsdpRuntime> weak = units.weak_from_this();
  return {.before =
              [weak, unit] {
                if (const auto alive = weak.lock()) alive->pre_forward(unit);
              },
          .after =
              [weak, unit](at::Tensor output) {
                const auto alive = weak.lock();
                return alive ? alive->post_forward(unit, std::move(output)) : output;
              },
          .input = dtype ? [dtype](const at::Tensor& input) { return in_dtype(input, dtype); }
                         : std::function<at::Tensor(const at::Tensor&)>()};
}

void attach_hooks(fsdp::FsdpRuntime& units, const std::vector<fsdp::ParamGroupPlan>& plans,
                  std::optional<at::ScalarType> dtype) {
  for (std::size_t u = 0; u < plans.size(); ++u) {
    for (std::size_t i = 0; i < plans[u].uses.size(); ++i) {
      fsdp::ForwardHooks hooks = make_forward_hooks(units, u, dtype);
      if (i + 1 < plans[u].uses.size()) hooks.after = [](at::Tensor output) { return output; };
      plans[u].uses[i](std::move(hooks));
    }
  }
}

std::int64_t elements_of(const fsdp::ParamGroupPlan& plan) {
  std::int64_t count = 0;
  for (const NamedTensor& parameter : plan.parameters) count += parameter.tensor.numel();
  return count;
}

/// A unit that holds most of the model has most of it in memory while it is used.
void warn_of_large_unit(const std::vector<fsdp::ParamGroupPlan>& plans) {
  std::int64_t all = 0;
  for (const auto& plan : plans) all += elements_of(plan);
  for (const auto& plan : plans) {
    const std::int64_t count = elements_of(plan);
    if (!plan.can_be_split || count <= all / 2) continue;
    log::warn_once(fmt::format(
        "fully_shard: unit '{}' holds {:.0f} % of all parameters, which are in memory together: put its children into "
        "a "
        "numbered list outside of it, or make it no member of a list, so that they become units of their own",
        plan.name, 100.0 * static_cast<double>(count) / static_cast<double>(all)));
  }
}

}  // namespace

FullyShardedDataParallel::FullyShardedDataParallel(torch::nn::Module& module, const DeviceMesh& mesh,
                                                   FullyShardOptions options)
    : param_dtype_(options.param_dtype) {
  check_options(mesh, options);
  const std::shared_ptr<Communicator> comm = mesh.communicator(shard_axis(mesh));
  const std::shared_ptr<Communicator> replicas = mesh.has(kReplicateAxis) ? mesh.communicator(kReplicateAxis) : nullptr;
  const std::vector<NamedTensor> all = nn::named_parameters(module);
  std::vector<std::string> lines = {fmt::format(
      "stage = {}, reshard_after_forward = {}, reshard_group = {}, prefetch = {}, offload = {}, "
      "smallest_unit = {}, gather_on_use = {}, param_dtype = {}, reduce_dtype = {}, gradient_reduction = {}",
      options.stage, options.reshard_after_forward, options.reshard_group, options.prefetch, options.offload,
      options.smallest_unit, options.gather_on_use, text_of(options.param_dtype), text_of(options.reduce_dtype),
      options.gradient_reduction == ReduceOp::sum ? "sum" : "avg")};
  const std::set<std::string> own_names = own_group_names(options.own_group, all);
  std::vector<NamedTensor> common, own;
  for (const NamedTensor& one : all) (own_names.contains(one.name) ? own : common).push_back(one);
  const auto agree = [&](const std::vector<NamedTensor>& parameters, Communicator& ranks) {
    for (const auto& [name, tensor, shard] : parameters) {
      lines.push_back(fmt::format("parameter '{}' {}", name, describe(tensor)));
    }
    if (replicas) require_same_on_all_ranks(*replicas, lines);
    require_same_on_all_ranks(ranks, lines);
    broadcast_parameters(parameters, ranks, replicas.get());
  };
  if (all.empty()) throw Error("fully_shard: the module has no parameters");
  agree(common, *comm);
  if (options.own_group) agree(own, *options.own_group->ranks);
  AttachedParameters attached(module);
  std::map<std::string, Init> init_of;
  for (const auto& [name, parameter, init, shard] : nn::parameter_inits(module)) init_of.emplace(name, init);

  std::vector<std::string> axes;
  if (replicas) axes.emplace_back(kReplicateAxis);
  axes.emplace_back(shard_axis(mesh));
  const DeviceMesh data = mesh.sub_mesh(axes);
  const std::vector<fsdp::ParamGroupPlan> plans =
      fsdp::find_units(module, options.smallest_unit, options.gather_on_use);
  const int group = options.reshard_group;
  const bool has_post_forward_group = group > 1 && group < comm->size();
  const auto post_forward_group =
      has_post_forward_group ? comm->split(comm->rank() / group, comm->rank(), "keepers") : nullptr;
  std::vector<std::unique_ptr<fsdp::ParamGroup>> units;
  int levels = 1;
  if (comm->size() > 1) warn_of_large_unit(plans);
  for (const auto& plan : plans) {
    levels = std::max(levels, plan.levels);
    const bool has_own_group = is_of_group(plan, own_names);
    const std::shared_ptr<Communicator>& ranks = has_own_group ? options.own_group->ranks : comm;
    const bool alone = ranks->size() == 1;
    const bool resident = alone || plan.is_root || options.stage < 3 || !options.reshard_after_forward || group == 1;
    units.push_back(std::make_unique<fsdp::ParamGroup>(
        plan.name, plan.parameters, ranks,
        fsdp::ParamGroupOptions{.mesh = data.shape(),
                                .mesh_rank = data.rank(),
                                .shard_axis = shard_axis(mesh),
                                .resident = resident,
                                .own_grads = alone || plan.is_root || options.stage == 1,
                                .watched = plan.uses.empty() && (!alone || options.offload || options.param_dtype),
                                .gathered_on_use = plan.on_use,
                                .offload = options.offload,
                                .param_dtype = options.param_dtype,
                                .reduce_dtype = options.reduce_dtype,
                                .gradient_reduction = options.gradient_reduction,
                                .post_forward_group = resident || has_own_group ? nullptr : post_forward_group}));
    if (plan.is_root && plan.uses.empty() && !plan.on_use) root_ = units.size() - 1;
    if (plan.is_root && plans.size() == 1 && !alone) {
      log::warn_once(fmt::format(
          "fully_shard: {} has no parts that say when they are used: it is one unit, whose {} of parameters, and as "
          "much of gradients, stay on every rank (docs/fsdp_your_net.md shows how to change that)",
          module.name(), human_bytes(static_cast<std::uint64_t>(units.back()->bytes()))));
    }
    for (std::size_t i = 0; i < units.back()->size(); ++i) {
      shards_.push_back(units.back()->shard(i));
      inits_.push_back(init_of.at(shards_.back().name));
      if (units.back()->is_trained(i)) trained_.push_back(shards_.back());
    }
  }
  runtime_ = fsdp::FsdpRuntime::make(std::move(units), comm, replicas, post_forward_group, options.prefetch, levels,
                                     std::move(attached));
  attach_hooks(*runtime_, plans, options.param_dtype);
  if (!options.output_dtype) return;
  const auto convert = [dtype = options.output_dtype](const at::Tensor& output) { return in_dtype(output, dtype); };
  if (fsdp::attach_to_output(module, convert)) return;
  run_output_dtype_ = options.output_dtype;
  log::warn_once(
      fmt::format("fully_shard: what {} returns is in output_dtype only where it is run by run()", module.name()));
}

std::shared_ptr<Communicator> FullyShardedDataParallel::post_forward_group() const {
  return runtime_->post_forward_group();
}

FullyShardedDataParallel::~FullyShardedDataParallel() { runtime_->detach(); }

void FullyShardedDataParallel::initialise(std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    fill_shard(shards_[i].tensor, inits_[i], seed, shards_[i].shard->spec, shards_[i].shard->rank);
  }
  invalidate_unsharded();
}

FullyShardedDataParallel::NoSync::NoSync(std::shared_ptr<fsdp::FsdpRuntime> units) : runtime_(std::move(units)) {
  runtime_->hold();
}

FullyShardedDataParallel::NoSync::~NoSync() {
  if (runtime_) runtime_->release();
}

FullyShardedDataParallel::NoAllReduce::NoAllReduce(std::shared_ptr<fsdp::FsdpRuntime> units)
    : runtime_(std::move(units)) {
  runtime_->hold_all_reduce();
}

FullyShardedDataParallel::NoAllReduce::~NoAllReduce() {
  if (runtime_) runtime_->release_all_reduce();
}

FullyShardedDataParallel::NoAllReduce FullyShardedDataParallel::no_all_reduce() { return NoAllReduce(runtime_); }

std::shared_ptr<StageSharding> FullyShardedDataParallel::in_pipeline() const {
  if (std::ranges::any_of(runtime_->units(), [](const auto& unit) { return unit->gathered_on_use(); })) {
    throw ConfigError(
        "fully_shard: a stage of a pipeline has units that are gathered on use: leave out gather_on_use, and run the "
        "stage's modules by nn::call() or in a Sequential");
  }
  return runtime_;
}

FullyShardedDataParallel::NoSync FullyShardedDataParallel::no_sync() { return NoSync(runtime_); }

void FullyShardedDataParallel::root_pre_forward() {
  if (root_) runtime_->pre_forward(*root_);
}

at::Tensor FullyShardedDataParallel::root_post_forward(at::Tensor output) {
  if (root_) output = runtime_->post_forward(*root_, std::move(output));
  return in_dtype(output, run_output_dtype_);
}

at::Tensor FullyShardedDataParallel::in_param_dtype(const at::Tensor& input) const {
  return in_dtype(input, param_dtype_);
}

void FullyShardedDataParallel::invalidate_unsharded() { runtime_->invalidate_unsharded(); }

std::vector<std::vector<std::string>> FullyShardedDataParallel::units() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& unit : runtime_->units()) {
    auto& list = names.emplace_back();
    for (std::size_t i = 0; i < unit->size(); ++i) list.push_back(unit->parameter(i).name);
  }
  return names;
}

FullyShardStatistics FullyShardedDataParallel::statistics() const {
  FullyShardStatistics result = runtime_->statistics();
  for (const auto& unit : runtime_->units()) {
    result.shard_bytes += unit->resident_bytes();
    result.sharded_grad_bytes += unit->reduced_bytes();
    result.padding_bytes += unit->padding_bytes();
  }
  return result;
}

}  // namespace phalanx
