#include "phalanx/train/model/parallel_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceType.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "phalanx/base/human.h"
#include "phalanx/config/model_config.h"
#include "phalanx/models/config/parameter_kinds.h"
#include "phalanx/models/expert_bias.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/nn/evaluation_mode.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/tensor/narrow_to_box.h"
#include "phalanx/train/model/autocast_guard.h"
#include "phalanx/train/model/pipelined_model.h"
#include "phalanx/train/model/replicated_model.h"
#include "phalanx/train/model/shard_options.h"
#include "phalanx/train/model/sharded_model.h"
#include "phalanx/train/model/trained_model.h"

namespace phalanx::train {

using observe::TraceSpan;

namespace {

std::int64_t bytes_of(const std::vector<NamedTensor>& tensors) {
  std::int64_t bytes = 0;
  for (const NamedTensor& one : tensors) bytes += static_cast<std::int64_t>(one.tensor.nbytes());
  return bytes;
}

std::int64_t bytes_of_optimizer(const config::OptimizerCopies& copies, const std::vector<std::string>& adamw_params,
                                const std::vector<NamedTensor>& trained) {
  std::int64_t bytes = 0;
  for (const NamedTensor& one : trained) {
    const bool is_matrix = models::is_muon_matrix(one.name, one.global_shape().size(), adamw_params);
    bytes += one.tensor.numel() * copies.bytes(is_matrix);
  }
  return bytes;
}

/// The ranks that differ from this one in their positions alone. Attention and the counts of routers, which take turns
/// in a pass, go over it. A group of its own also where that is the whole world: they then do not queue behind what
/// other parts of the run send.
std::shared_ptr<Communicator> context_group(const ParallelPlan& plan, const std::shared_ptr<Communicator>& world) {
  if (plan.cp == 1) return nullptr;
  const std::int64_t rank = world->rank();
  return world->split(static_cast<int>(rank / (plan.tp * plan.cp) * plan.tp + rank % plan.tp),
                      static_cast<int>(plan.context_parallel_rank(rank)), "cp");
}

/// The ranks whose tokens are counted together for the loss that evens out the load of experts. Those of tensor
/// parallelism have the same tokens, so they are no part of it.
std::shared_ptr<Communicator> load_group(const config::TrainConfig& config, const ParallelPlan& plan,
                                         const DeviceMesh& mesh, const std::shared_ptr<Communicator>& context) {
  if (!config::counts_load_over_data_ranks(config)) return context;
  if (plan.loss_parts() == 1) return nullptr;
  std::vector<std::string> names;
  for (const MeshAxis& axis : mesh.axes()) {
    if (axis.name != "pp" && axis.name != "tp") names.push_back(axis.name);
  }
  return mesh.flatten(names);
}

std::function<void(const at::Tensor&)> sum_over(const std::shared_ptr<Communicator>& group) {
  if (group == nullptr) return nullptr;
  return [group](const at::Tensor& counts) { group->all_reduce(counts).wait(); };
}

}  // namespace

std::unique_ptr<ParallelModel> make_parallel_model(const config::TrainConfig& config, const config::RunPlan& plan,
                                                   std::shared_ptr<Communicator> world, at::Device device) {
  std::unique_ptr<ParallelModel> model;
  if (plan.parallel.pp > 1) {
    model = std::make_unique<PipelinedModel>(config, plan, std::move(world), device);
  } else if (plan.parallel.is_sharded()) {
    model = std::make_unique<ShardedModel>(config, plan, std::move(world), device);
  } else {
    model = std::make_unique<ReplicatedModel>(config, plan, std::move(world), device);
  }
  for (nn::Module* const module : model->modules()) model->use_expert_biases(dynamic_cast<models::Llama&>(*module));
  return model;
}

ParallelModel::ParallelModel(const config::TrainConfig& config, const config::RunPlan& plan,
                             std::shared_ptr<Communicator> world, at::Device device)
    : world_(std::move(world)),
      mesh_(world_, plan.parallel.axes(), c10::DeviceTypeName(device.type(), /*lower_case=*/true)),
      experts_(ExpertMesh::make(plan.parallel, mesh_)),
      context_(context_group(plan.parallel, world_)),
      plan_(plan),
      device_(device),
      model_(build_model(
          config, config::model_config(config),
          // Replicas get memory when they are cut (parallelize.h), and no wide one for what is stored in 4 bits.
          nn::TensorOptionsOfModule{.device = device, .without_memory = true})),
      frozen_(frozen_parameters(config, model_->config())),
      z_loss_weight_(config.training.z_loss_weight),
      expert_load_(ExpertLoad::make(config, plan.parallel, model_->config(), world_, device)),
      preferences_(config.dpo.preferences.empty() ? nullptr : std::make_unique<PreferenceLoss>(config.dpo)),
      optimizer_copies_(config::optimizer_copies(config)),
      adamw_params_(config.muon.adamw_params),
      has_dropout_(config.lora.rank > 0 && config.lora.dropout > 0),
      // Ranks of tensor parallelism have the same tokens, and the sum of their gradients is taken.
      load_weight_(config.training.moe_aux_loss_coeff / static_cast<double>(plan.global_batch_size * plan.parallel.tp)),
      router_z_weight_(config.training.moe_z_loss_coeff /
                       static_cast<double>(plan.global_batch_size * config.training.seq_len * plan.parallel.tp)),
      counts_sequences_(config.training.moe_aux_loss_unit == "sequence"),
      load_group_(load_group(config, plan.parallel, mesh_, context_)),
      jitter_eps_(config.training.moe_input_jitter_eps),
      capacity_factor_(config.training.moe_expert_capacity_factor),
      seed_(static_cast<std::uint64_t>(config.debug.seed)),
      sharding_text_(sharding_text(config)),
      keeps_full_gradients_(config.parallelism.zero_stage == 1) {}

at::Tensor ParallelModel::run_whole_model(const TokenBatch& batch, const ForwardBackwardPass& pass, bool sync) {
  observe::TraceRecorder* const tracing = pass.profiler ? pass.profiler->recorder() : nullptr;
  place_in_run(*model_, pass.step, pass.first_row);
  prepare_experts(*model_, pass.optimizer_step);
  at::Tensor loss;
  {
    const TraceSpan span(tracing, "forward", "compute");
    const AutocastGuard autocast(device_.type(), pass.autocast);
    const auto of_pairs = document_loss(batch.preferences.get());
    loss = model_->loss(batch.inputs, batch.labels,
                        {.documents = batch.documents,
                         .divisor = pass.divisor,
                         .z_loss_weight = z_loss_weight_,
                         .document_loss = of_pairs ? &*of_pairs : nullptr});
  }
  {
    const TraceSpan span(tracing, "backward", "compute");
    pass.optimizer_step.scaled(loss).backward();
    if (tracing && sync) pass.profiler->backward_done();
  }
  return loss.detach();
}

std::vector<NamedTensor> ParallelModel::with_other_experts(const std::vector<NamedTensor>& held,
                                                           const std::vector<std::string>& names) const {
  return experts_ ? experts_->with_others(held, names) : held;
}

void ParallelModel::give_empty_gradients(const std::vector<NamedTensor>& trained) {
  for (const auto& [name, tensor, shard] : trained) {
    if (tensor.numel() == 0) tensor.mutable_grad() = at::empty_like(tensor);
  }
}

void ParallelModel::place_in_run(models::Llama& model, std::int64_t step, std::int64_t first_row) const {
  const nn::PlaceInRun place{.seed = seed_, .step = step, .first_row = first_row};
  if (has_dropout_) nn::set_dropout_rng_state(model, place);
  if (jitter_eps_ == 0) return;
  for (const models::MixtureOfLayer& one : models::mixtures_of(model)) {
    one.mixture->set_jitter({.eps = jitter_eps_,
                             .layer = fmt::format("layers.{}.moe", one.layer),
                             .place = place,
                             .cut = plan_.parallel.context_cut(world_->rank())});
  }
}

void ParallelModel::begin_step() const {
  if (expert_load_) expert_load_->begin_step();
}

std::vector<NamedTensor> ParallelModel::with_expert_biases(std::vector<NamedTensor> weights) const {
  if (expert_load_) std::ranges::copy(expert_load_->named_biases(), std::back_inserter(weights));
  return weights;
}

void ParallelModel::use_expert_biases(models::Llama& model) const {
  if (expert_load_) expert_load_->attach(model, /*counts=*/false);
}

void ParallelModel::prepare_experts(models::Llama& model, const OptimizerStep& optimizer_step) const {
  if (!expert_load_) return;
  expert_load_->attach(model, /*counts=*/true);
  const std::vector<models::MixtureOfLayer> mixtures = models::mixtures_of(model);
  if (capacity_factor_ != 0) {
    for (const models::MixtureOfLayer& one : mixtures) {
      one.mixture->set_capacity({.factor = capacity_factor_,
                                 .cut = plan_.parallel.context_cut(world_->rank()),
                                 .sum_counts = sum_over(context_)});
    }
  }
  if (load_weight_ == 0 && router_z_weight_ == 0) return;
  at::Tensor scale = optimizer_step.loss_scale_on_device();
  if (const double on_host = optimizer_step.loss_scale(); !scale.defined() && on_host != 1) {
    scale = at::full({}, on_host, at::TensorOptions(device_).dtype(at::kFloat));
  }
  for (const models::MixtureOfLayer& one : mixtures) {
    one.mixture->set_losses({.load_weight = load_weight_,
                             .z_weight = router_z_weight_,
                             .loss_scale = scale,
                             .load_unit = counts_sequences_ ? nn::LoadUnit::sequence : nn::LoadUnit::pass,
                             .sequence_ranks = plan_.parallel.cp,
                             .sum_counts = sum_over(load_group_)});
  }
}

at::Tensor ParallelModel::loss_sum_of_whole_model(const TokenBatch& batch) {
  const nn::EvaluationMode evaluating(modules());
  const auto of_pairs = document_loss(batch.preferences.get());
  return model_->loss(batch.inputs, batch.labels,
                      {.documents = batch.documents, .divisor = 1.0, .document_loss = of_pairs ? &*of_pairs : nullptr});
}

std::optional<models::DocumentLoss> ParallelModel::document_loss(const PreferenceBatch* batch) const {
  return batch == nullptr ? std::nullopt : std::optional(preferences_->of(*batch));
}

std::vector<std::shared_ptr<Communicator>> ParallelModel::communicators() const {
  std::vector<std::shared_ptr<Communicator>> all = {world_};
  for (const auto& axis : mesh_.axes()) {
    if (mesh_.communicator(axis.name) != world_) all.push_back(mesh_.communicator(axis.name));
  }
  if (experts_) all.insert(all.end(), {experts_->ep(), experts_->dp_shard()});
  all.insert(all.end(), copy_groups_.begin(), copy_groups_.end());
  if (context_) all.push_back(context_);
  if (load_group_ && load_group_ != context_) all.push_back(load_group_);
  for (const auto* sharding : shardings()) {
    if (const auto post_forward_group = sharding->post_forward_group()) all.push_back(post_forward_group);
  }
  return all;
}

Communicator* ParallelModel::grad_norm_group() const { return is_model_sharded() ? world_.get() : nullptr; }

void ParallelModel::collect_state(TrainState& state) const {
  const auto named = with_prefix("model.", with_expert_biases(weights()));
  state.tensors.insert(state.tensors.end(), named.begin(), named.end());
}

std::vector<NamedTensor> ParallelModel::full_weights_on_rank0(
    const std::function<bool(const std::string&)>& wanted) const {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor, shard] : weights()) {
    if (wanted && !wanted(name)) continue;
    at::Tensor whole = tensor;
    if (shard) {
      // Each element is non-zero on one rank only.
      whole = at::zeros(shard->spec.shape(), tensor.options());
      if (shard->is_first_holder()) narrow_to_box(whole, shard->box()).copy_(tensor);
      world_->reduce(whole, {.root = 0});
    }
    if (world_->rank() == 0) result.push_back({name, shard ? whole.to(at::kCPU) : whole});
  }
  return result;
}

std::string ParallelModel::layout() const {
  if (plan_.world_size == 1) return "1 rank";
  const ParallelPlan& plan = plan_.parallel;
  std::string text = fmt::format("{} ranks", plan_.world_size);
  if (plan.is_sharded()) {
    text += fmt::format(", {} over {}", sharding_text_, plan.shards());
    if (plan.ep > 1) text += fmt::format(", experts divided among {}", plan.ep);
    if (plan.dp_replicate > 1) text += fmt::format(", replicated {} times", plan.dp_replicate);
  } else if (plan.dp_replicate > 1) {
    text += plan.ranks() > plan.dp_replicate ? fmt::format(", data parallel over {}", plan.dp_replicate)
                                             : ", data parallel";
  }
  if (plan.cp > 1) text += fmt::format(", context parallel over {}", plan.cp);
  if (const std::string stages = pipeline_text(); !stages.empty()) text += ", " + stages;
  if (plan.tp > 1) {
    text += fmt::format(", tensor parallel over {}{}", plan.tp, plan.sequence_parallel ? " (tokens too)" : "");
  }
  return text;
}

observe::MemoryCounts ParallelModel::held() const {
  using enum observe::MemoryCategory;
  observe::MemoryCounts counts;
  if (!plan_.parallel.is_sharded()) {
    for (const auto& named : weights()) counts[parameters] += static_cast<std::int64_t>(named.tensor.nbytes());
    counts[gradients] = bytes_of(without(frozen_, weights()));
    return counts;
  }
  for (const auto* sharding : shardings()) {
    const FullyShardStatistics statistics = sharding->statistics();
    counts[parameters] += statistics.shard_bytes;
    counts[gradients] += statistics.sharded_grad_bytes;
    counts[keeps_full_gradients_ ? gradients : buffers] += statistics.gradient_bytes;
    counts[buffers] += statistics.unsharded_bytes;
  }
  return counts;
}

std::string ParallelModel::memory_text() const {
  const auto bytes = [](std::int64_t count) { return human_bytes(static_cast<std::uint64_t>(count)); };
  if (!plan_.parallel.is_sharded()) {
    return fmt::format("{} for weights, gradients and optimizer on {}, and activations",
                       bytes(bytes_of(weights()) + bytes_of(without(frozen_, weights())) +
                             bytes_of_optimizer(optimizer_copies_, adamw_params_, without(frozen_, weights()))),
                       plan_.parallel.pp > 1 ? "rank 0" : "each rank");
  }
  const std::int64_t state = bytes_of_optimizer(optimizer_copies_, adamw_params_, without(frozen_, weights()));
  std::int64_t weight_bytes = 0, gradient_bytes = 0, unsharded_bytes = 0;
  for (const auto* sharding : shardings()) {
    const FullyShardStatistics statistics = sharding->statistics();
    weight_bytes += statistics.shard_bytes;
    gradient_bytes += statistics.sharded_grad_bytes;
    unsharded_bytes += statistics.unsharded_bytes;
  }
  return fmt::format(
      "{} of weights, {} of gradients, {} of optimizer state on this rank; {} for gathered units, then {} and "
      "activations",
      bytes(weight_bytes), bytes(gradient_bytes), bytes(state), bytes(unsharded_bytes),
      plan_.parallel.pp > 1 ? "whole gradients of its stages" : "gradients of units,");
}

}  // namespace phalanx::train
