#include "phalanx/train/parallel_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "phalanx/base/human.h"
#include "phalanx/config/model_config.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/nn/init.h"
#include "phalanx/train/recompute_layers.h"
#include "phalanx/train/shard_options.h"

namespace phalanx::train {
namespace {

/// The dimension along which activations are split. It is the sequences, if each batch has equally many for each rank:
/// then no row moves within a rank, and complete parts are exchanged while others are multiplied. Over many devices it
/// is the positions: more of the exchange is hidden behind products (tensor_parallel.md).
int split_dim(const TrainConfig& config, const RunPlan& plan, at::Device device) {
  if (!config.parallelism.enable_async_tensor_parallel) return 1;
  const bool divides = plan.local_batch_size % plan.parallel.tp == 0 && plan.parallel.pp == 1;
  return divides && !config.validation.enable && (device.is_cpu() || plan.parallel.tp == 2) ? 0 : 1;
}

}  // namespace

ParallelModel::ParallelModel(const TrainConfig& config, const RunPlan& plan, std::shared_ptr<Communicator> world,
                             at::Device device)
    : world_(std::move(world)), mesh_(world_, plan.parallel.axes(), device.is_cuda() ? "cuda" : "cpu"), plan_(plan) {
  keeps_full_gradients_ = config.parallelism.zero_stage == 1;
  reduces_each_microbatch_ = reduces_each_microbatch(config);
  stage_text_ = sharding_text(config);
  optimizer_copies_ = config.optimizer.name == "AdamW" ? 2 : config.optimizer.momentum > 0 ? 1 : 0;
  const bool is_sharded = plan.parallel.dp_shard > 1;
  const bool is_cut = plan.parallel.uses_model_parallelism();
  model_ = std::make_shared<models::Llama>(
      model_config(config), nn::TensorOptionsOfModule{.device = device, .without_memory = is_sharded || is_cut});
  if (plan.parallel.tp > 1) {
    models::parallelize_llama(*model_, mesh_,
                              {.sequence_parallel = plan.parallel.sequence_parallel,
                               .split_dim = split_dim(config, plan, device),
                               .overlap = config.parallelism.enable_async_tensor_parallel,
                               .seq_len = config.training.seq_len});
  }
  if (plan.parallel.pp > 1) {
    pipeline_ = std::make_unique<PipelineModel>(config, plan, mesh_, device, *model_);
    if (plan.parallel.dp_replicate > 1 && !is_sharded) replicas_ = mesh_.communicator("dp_replicate");
    return;
  }
  recompute_layers(*model_, config);
  if (!is_sharded) {
    nn::materialize(*model_);
    replicas_ = replicate_group();
    return;
  }
  sharded_ = std::make_unique<FullyShardedDataParallel>(*model_, mesh_, shard_options(config));
}

/// A rank that shares its batch only with its tensor-parallel group averages with itself, so that its gradients get
/// buckets too.
std::shared_ptr<Communicator> ParallelModel::replicate_group() const {
  if (mesh_.has("dp_replicate")) return mesh_.communicator("dp_replicate");
  return world_->size() == 1 ? world_ : world_->split(world_->rank(), 0);
}

void ParallelModel::initialise(std::uint64_t seed) {
  if (sharded_) {
    sharded_->initialise(seed);
  } else if (pipeline_) {
    pipeline_->initialise(seed);
  } else {
    nn::initialise(*model_, seed);
  }
}

at::Tensor ParallelModel::train_pipeline(const at::Tensor& inputs, const at::Tensor& labels, double loss_scale,
                                         observe::TraceRecorder* trace) {
  return at::full({}, pipeline_->train(inputs, labels, loss_scale, trace),
                  at::TensorOptions(inputs.device()).dtype(at::kDouble));
}

at::Tensor ParallelModel::loss(const at::Tensor& inputs, const at::Tensor& labels) {
  if (!pipeline_) return model_->loss(inputs, labels);
  return at::full({}, pipeline_->evaluate(inputs, labels), at::TensorOptions(inputs.device()).dtype(at::kDouble));
}

std::vector<nn::Module*> ParallelModel::modules() const {
  if (!pipeline_) return {model_.get()};
  std::vector<nn::Module*> modules;
  for (const auto& stage : pipeline_->models()) modules.push_back(stage.get());
  return modules;
}

std::vector<NamedTensor> ParallelModel::weights() const {
  if (pipeline_) return pipeline_->weights();
  return sharded_ ? sharded_->parameters() : nn::named_parameters(*model_);
}

std::vector<NamedTensor> ParallelModel::replicated_weights() const {
  std::vector<NamedTensor> all = weights();
  if (pipeline_) all.insert(all.end(), pipeline_->copies().begin(), pipeline_->copies().end());
  return all;
}

void ParallelModel::values_were_loaded() {
  if (pipeline_) pipeline_->invalidate_unsharded();
  if (sharded_) {
    sharded_->invalidate_unsharded();
  } else if (are_attached_) {
    return;
  } else if (!pipeline_) {
    ddp_ = std::make_unique<DistributedDataParallel>(*model_, replicas_);
  } else if (replicas_) {
    pipeline_->average_over(replicas_);
  }
  are_attached_ = true;
}

const std::vector<NamedTensor>& ParallelModel::parameters() const {
  if (pipeline_) return pipeline_->weights();
  return sharded_ ? sharded_->parameters() : ddp_->parameters();
}

std::shared_ptr<void> ParallelModel::no_sync() {
  if (sharded_ && reduces_each_microbatch_) {
    return std::make_shared<FullyShardedDataParallel::NoAllReduce>(sharded_->no_all_reduce());
  }
  if (sharded_) return std::make_shared<FullyShardedDataParallel::NoSync>(sharded_->no_sync());
  return std::make_shared<DistributedDataParallel::NoSync>(ddp_->no_sync());
}

std::vector<std::shared_ptr<Communicator>> ParallelModel::communicators() const {
  std::vector<std::shared_ptr<Communicator>> all = {world_};
  for (const auto& axis : mesh_.axes()) {
    if (mesh_.communicator(axis.name) != world_) all.push_back(mesh_.communicator(axis.name));
  }
  for (const auto* sharding : shardings()) {
    if (const auto post_forward_group = sharding->post_forward_group()) all.push_back(post_forward_group);
  }
  return all;
}

std::vector<const FullyShardedDataParallel*> ParallelModel::shardings() const {
  if (pipeline_) return pipeline_->shardings();
  return sharded_ ? std::vector<const FullyShardedDataParallel*>{sharded_.get()}
                  : std::vector<const FullyShardedDataParallel*>{};
}

Communicator* ParallelModel::grad_norm_group() const { return is_model_sharded() ? world_.get() : nullptr; }

void ParallelModel::collect_state(TrainState& state) const {
  const auto named = with_prefix("model.", weights());
  state.tensors.insert(state.tensors.end(), named.begin(), named.end());
  if (ddp_) ddp_->collect_state(state);
}

std::vector<NamedTensor> ParallelModel::full_weights_on_rank0() const {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor, shard] : weights()) {
    at::Tensor whole = tensor;
    if (shard) {
      // Each element is non-zero on one rank only.
      whole = at::zeros(shard->spec.shape(), tensor.options());
      at::Tensor part = whole;
      const Box box = shard->box();
      for (std::size_t dim = 0; dim < box.shape.size(); ++dim) {
        part = part.narrow(static_cast<std::int64_t>(dim), box.offsets[dim], box.shape[dim]);
      }
      if (shard->is_first_holder()) part.copy_(tensor);
      world_->reduce(whole, {.root = 0});
    }
    if (world_->rank() == 0) result.push_back({name, whole});
  }
  return result;
}

std::string ParallelModel::layout() const {
  if (plan_.world_size == 1) return "1 rank";
  const ParallelPlan& plan = plan_.parallel;
  std::string text = fmt::format("{} ranks", plan_.world_size);
  if (plan.dp_shard > 1) {
    text += fmt::format(", {} over {}", stage_text_, plan.dp_shard);
    if (plan.dp_replicate > 1) text += fmt::format(", replicated {} times", plan.dp_replicate);
  } else if (plan.dp_replicate > 1) {
    text +=
        plan.uses_model_parallelism() ? fmt::format(", data parallel over {}", plan.dp_replicate) : ", data parallel";
  }
  if (pipeline_) text += ", " + pipeline_->text();
  if (plan.tp > 1) {
    text += fmt::format(", tensor parallel over {}{}", plan.tp, plan.sequence_parallel ? " (tokens too)" : "");
  }
  return text;
}

observe::MemoryCounts ParallelModel::held() const {
  using enum observe::MemoryCategory;
  observe::MemoryCounts counts;
  if (plan_.parallel.dp_shard == 1) {
    for (const auto& named : weights()) counts[parameters] += static_cast<std::int64_t>(named.tensor.nbytes());
    counts[gradients] = counts[parameters];
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
  if (plan_.parallel.dp_shard == 1) {
    std::int64_t weight_bytes = 0;
    for (const auto& p : weights()) weight_bytes += static_cast<std::int64_t>(p.tensor.nbytes());
    return fmt::format("{} for weights, gradients and optimizer on {}, and activations",
                       bytes(weight_bytes * (2 + optimizer_copies_)), plan_.parallel.pp > 1 ? "rank 0" : "each rank");
  }
  std::int64_t rows = 0, weight_bytes = 0, gradient_bytes = 0, unsharded_bytes = 0;
  for (const auto& p : weights()) rows += static_cast<std::int64_t>(p.tensor.nbytes());
  for (const auto* sharding : shardings()) {
    const FullyShardStatistics statistics = sharding->statistics();
    weight_bytes += statistics.shard_bytes;
    gradient_bytes += statistics.sharded_grad_bytes;
    unsharded_bytes += statistics.unsharded_bytes;
  }
  return fmt::format(
      "{} of weights, {} of gradients, {} of optimizer state on this rank; {} for gathered units, then {} and "
      "activations",
      bytes(weight_bytes), bytes(gradient_bytes), bytes(rows * optimizer_copies_), bytes(unsharded_bytes),
      pipeline_ ? "whole gradients of its stages" : "gradients of units,");
}

}  // namespace phalanx::train
