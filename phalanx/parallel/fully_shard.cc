#include "phalanx/parallel/fully_shard.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/fsdp/find_units.h"
#include "phalanx/parallel/fsdp/sharded_units.h"
#include "phalanx/parallel/replicate.h"

namespace phalanx {
namespace {

constexpr const char* kShardAxis = "dp_shard";
constexpr const char* kReplicateAxis = "dp_replicate";
constexpr std::size_t kBroadcastBytes = 25 << 20;

void check_options(const DeviceMesh& mesh, const FullyShardOptions& options) {
  if (!mesh.has(kShardAxis)) {
    throw ConfigError(
        fmt::format("fully_shard: {} has no axis '{}': make one, of one rank if need be", mesh.text(), kShardAxis));
  }
  if (options.stage < 1 || options.stage > 3) {
    throw ConfigError(fmt::format("fully_shard: stage is {}: expected 1, 2 or 3", options.stage));
  }
}

/// The values of the mesh's first rank become everybody's. Parameters without memory have none.
void take_first_ranks_values(const std::vector<NamedTensor>& all, Communicator& comm, Communicator* replicas) {
  std::vector<NamedTensor> present;
  for (const auto& named : all) {
    if (has_memory(named.tensor)) present.push_back(named);
  }
  if (replicas != nullptr) broadcast_coalesced(*replicas, present, kBroadcastBytes);
  broadcast_coalesced(comm, present, kBroadcastBytes);
}

fsdp::Around around_unit(fsdp::ShardedUnits& units, std::size_t unit) {
  const std::weak_ptr<fsdp::ShardedUnits> weak = units.weak_from_this();
  return {.before =
              [weak, unit] {
                if (const auto alive = weak.lock()) alive->before_use(unit);
              },
          .after =
              [weak, unit](at::Tensor output) {
                const auto alive = weak.lock();
                return alive ? alive->after_use(unit, std::move(output)) : output;
              }};
}

void attach_hooks(fsdp::ShardedUnits& units, const std::vector<fsdp::UnitPlan>& plans) {
  for (std::size_t u = 0; u < plans.size(); ++u) {
    for (std::size_t i = 0; i < plans[u].uses.size(); ++i) {
      fsdp::Around around = around_unit(units, u);
      if (i + 1 < plans[u].uses.size()) around.after = [](at::Tensor output) { return output; };
      plans[u].uses[i](std::move(around));
    }
  }
}

}  // namespace

FullyShardedDataParallel::FullyShardedDataParallel(torch::nn::Module& module, const DeviceMesh& mesh,
                                                   FullyShardOptions options) {
  check_options(mesh, options);
  const std::shared_ptr<Communicator> comm = mesh.communicator(kShardAxis);
  const std::shared_ptr<Communicator> replicas = mesh.has(kReplicateAxis) ? mesh.communicator(kReplicateAxis) : nullptr;
  const std::vector<NamedTensor> all = nn::named_parameters(module);
  std::vector<std::string> lines = {fmt::format("stage = {}, reshard_after_forward = {}, smallest_unit = {}",
                                                options.stage, options.reshard_after_forward, options.smallest_unit)};
  for (const auto& [name, tensor, shard] : all)
    lines.push_back(fmt::format("parameter '{}' {}", name, describe(tensor)));
  if (replicas) require_same_on_all_ranks(*replicas, lines);
  require_same_on_all_ranks(*comm, lines);
  if (all.empty()) throw Error("fully_shard: the module has no parameters");
  take_first_ranks_values(all, *comm, replicas.get());
  std::map<std::string, Init> init_of;
  for (const auto& [name, parameter, init] : nn::parameter_inits(module)) init_of.emplace(name, init);

  std::vector<std::string> axes;
  if (replicas) axes.emplace_back(kReplicateAxis);
  axes.emplace_back(kShardAxis);
  const DeviceMesh data = mesh.sub_mesh(axes);
  const std::vector<fsdp::UnitPlan> plans = fsdp::find_units(module, options.smallest_unit);
  std::vector<std::unique_ptr<fsdp::Unit>> units;
  for (const auto& plan : plans) {
    const bool alone = comm->size() == 1;
    units.push_back(std::make_unique<fsdp::Unit>(
        plan.name, plan.parameters, comm,
        fsdp::UnitOptions{.mesh = data.shape(),
                          .mesh_rank = data.rank(),
                          .shard_axis = kShardAxis,
                          .resident = alone || plan.is_root || options.stage < 3 || !options.reshard_after_forward,
                          .own_grads = alone || plan.is_root || options.stage == 1}));
    if (plan.is_root && plan.uses.empty()) root_ = units.size() - 1;
    if (plan.is_root && plans.size() == 1 && !alone) {
      log::warn_once(fmt::format(
          "fully_shard: {} has no parts that say when they are used: it is one unit, whose {} of parameters, and as "
          "much of gradients, stay on every rank (docs/sharding.md shows how to change that)",
          module.name(), human_bytes(static_cast<std::uint64_t>(units.back()->bytes()))));
    }
    for (std::size_t i = 0; i < units.back()->size(); ++i) {
      shards_.push_back(units.back()->shard(i));
      inits_.push_back(init_of.at(shards_.back().name));
      if (units.back()->is_trained(i)) trained_.push_back(shards_.back());
    }
  }
  units_ = fsdp::ShardedUnits::make(std::move(units), comm, replicas);
  attach_hooks(*units_, plans);
}

FullyShardedDataParallel::~FullyShardedDataParallel() { units_->detach(); }

void FullyShardedDataParallel::initialise(std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    fill_shard(shards_[i].tensor, inits_[i], seed, shards_[i].shard->spec, shards_[i].shard->rank);
  }
  forget_values();
}

FullyShardedDataParallel::NoSync::NoSync(std::shared_ptr<fsdp::ShardedUnits> units) : units_(std::move(units)) {
  units_->hold();
}

FullyShardedDataParallel::NoSync::~NoSync() {
  if (units_) units_->release();
}

FullyShardedDataParallel::NoSync FullyShardedDataParallel::no_sync() { return NoSync(units_); }

void FullyShardedDataParallel::before_root() {
  if (root_) units_->before_use(*root_);
}

at::Tensor FullyShardedDataParallel::after_root(at::Tensor output) {
  return root_ ? units_->after_use(*root_, std::move(output)) : output;
}

void FullyShardedDataParallel::forget_values() { units_->forget_values(); }

std::vector<std::vector<std::string>> FullyShardedDataParallel::units() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& unit : units_->units()) {
    auto& list = names.emplace_back();
    for (std::size_t i = 0; i < unit->size(); ++i) list.push_back(unit->parameter(i).name);
  }
  return names;
}

FullyShardStatistics FullyShardedDataParallel::statistics() const {
  FullyShardStatistics result = units_->statistics();
  for (const auto& unit : units_->units()) {
    result.shard_bytes += unit->resident() ? unit->bytes() : unit->shard_bytes();
    if (!unit->own_grads()) result.reduced_bytes_kept += unit->shard_bytes();
    result.padding_bytes += unit->layout().padding() * unit->bytes() / unit->layout().flat_elements();
  }
  return result;
}

}  // namespace phalanx
