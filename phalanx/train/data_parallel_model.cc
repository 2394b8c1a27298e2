#include "phalanx/train/data_parallel_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "phalanx/base/human.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/train/model_config.h"
#include "phalanx/train/precision.h"

namespace phalanx::train {

DataParallelModel::DataParallelModel(const TrainConfig& config, const BatchPlan& plan,
                                     std::shared_ptr<Communicator> world, at::Device device)
    : world_(std::move(world)), plan_(plan) {
  optimizer_copies_ = config.optimizer.name == "AdamW" ? 2 : config.optimizer.momentum > 0 ? 1 : 0;
  const bool is_sharded = plan.shards > 1;
  model_ = std::make_shared<models::Llama>(model_config(config),
                                           nn::TensorOptionsOfModule{.device = device, .without_memory = is_sharded});
  const std::int64_t every = recompute_every(config);
  const kernels::KeepPolicy keep = keeps_costly(config) ? kernels::KeepPolicy(keep_costly) : nullptr;
  for (std::size_t i = 0; every > 0 && i < model_->layers.size(); ++i) {
    if (i % static_cast<std::size_t>(every) == 0) checkpoint_activations(*model_->layers[i], keep);
  }
  if (!is_sharded) return;
  std::vector<MeshAxis> axes;
  if (plan.replicas > 1) axes.push_back({"dp_replicate", static_cast<int>(plan.replicas)});
  axes.push_back({"dp_shard", static_cast<int>(plan.shards)});
  const auto& parallelism = config.parallelism;
  const bool reshard = parallelism.fsdp_reshard_after_forward != "never";
  const auto group = static_cast<int>(reshard_group(config));
  const DeviceMesh mesh(world_, std::move(axes), device.is_cuda() ? "cuda" : "cpu");
  for (const auto& axis : mesh.axes()) {
    if (mesh.communicator(axis.name) != world_) of_axes_.push_back(mesh.communicator(axis.name));
  }
  sharded_ =
      std::make_unique<FullyShardedDataParallel>(*model_, mesh,
                                                 FullyShardOptions{.stage = static_cast<int>(parallelism.zero_stage),
                                                                   .reshard_after_forward = reshard,
                                                                   .reshard_group = group,
                                                                   .offload = config.training.enable_cpu_offload,
                                                                   .param_dtype = sharded_param_dtype(config),
                                                                   .reduce_dtype = sharded_reduce_dtype(config),
                                                                   .output_dtype = at::kFloat});
  keeps_whole_gradients_ = parallelism.zero_stage == 1;
  stage_text_ = fmt::format("ZeRO-{}", parallelism.zero_stage);
  if (parallelism.zero_stage == 3 && !reshard) stage_text_ += " (gathered until the backward pass)";
  if (parallelism.zero_stage == 3 && group > 0) {
    stage_text_ += fmt::format(" (kept by every {} ranks until the backward pass)", group);
  }
  if (config.training.enable_cpu_offload) stage_text_ += ", offloaded to the host,";
}

void DataParallelModel::initialise(std::uint64_t seed) {
  if (sharded_) {
    sharded_->initialise(seed);
  } else {
    nn::initialise(*model_, seed);
  }
}

std::vector<NamedTensor> DataParallelModel::weights() const {
  return sharded_ ? sharded_->parameters() : nn::named_parameters(*model_);
}

void DataParallelModel::values_were_loaded() {
  if (sharded_) {
    sharded_->forget_values();
  } else if (!ddp_) {
    ddp_ = std::make_unique<DistributedDataParallel>(*model_, world_);
  }
}

const std::vector<NamedTensor>& DataParallelModel::parameters() const {
  return sharded_ ? sharded_->parameters() : ddp_->parameters();
}

std::shared_ptr<void> DataParallelModel::no_sync() {
  if (sharded_) return std::make_shared<FullyShardedDataParallel::NoSync>(sharded_->no_sync());
  return std::make_shared<DistributedDataParallel::NoSync>(ddp_->no_sync());
}

std::vector<std::shared_ptr<Communicator>> DataParallelModel::communicators() const {
  std::vector<std::shared_ptr<Communicator>> all = {world_};
  all.insert(all.end(), of_axes_.begin(), of_axes_.end());
  if (const auto keepers = sharded_ ? sharded_->reshard_ranks() : nullptr) all.push_back(keepers);
  return all;
}

Communicator* DataParallelModel::norm_ranks() const { return sharded_ ? world_.get() : nullptr; }

void DataParallelModel::collect_state(TrainState& state) const {
  const auto named = with_prefix("model.", weights());
  state.tensors.insert(state.tensors.end(), named.begin(), named.end());
  if (ddp_) ddp_->collect_state(state);
}

std::vector<NamedTensor> DataParallelModel::whole_on_first_rank() const {
  if (!sharded_) return world_->rank() == 0 ? nn::named_parameters(*model_) : std::vector<NamedTensor>();
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor, shard] : sharded_->parameters()) {
    const Box box = shard->box();
    // Each element has one addend that is not zero.
    const at::Tensor sum = at::zeros(shard->spec.shape(), tensor.options());
    if (shard->is_first_holder()) sum.narrow(0, box.offsets[0], box.shape[0]).copy_(tensor);
    world_->reduce(sum, {.root = 0});
    if (world_->rank() == 0) result.push_back({name, sum});
  }
  return result;
}

std::string DataParallelModel::layout() const {
  if (plan_.world_size == 1) return "1 rank";
  if (!sharded_) return fmt::format("{} ranks, data parallel", plan_.world_size);
  return fmt::format("{} ranks, {} over {}{}", plan_.world_size, stage_text_, plan_.shards,
                     plan_.replicas > 1 ? fmt::format(", replicated {} times", plan_.replicas) : "");
}

observe::MemoryCounts DataParallelModel::held() const {
  using enum observe::MemoryCategory;
  observe::MemoryCounts counts;
  if (!sharded_) {
    for (const auto& named : weights()) counts[parameters] += static_cast<std::int64_t>(named.tensor.nbytes());
    counts[gradients] = counts[parameters];
    return counts;
  }
  const FullyShardStatistics statistics = sharded_->statistics();
  counts[parameters] = statistics.shard_bytes;
  counts[gradients] = statistics.reduced_bytes_kept;
  counts[keeps_whole_gradients_ ? gradients : buffers] += statistics.gradient_bytes;
  counts[buffers] += statistics.gathered_bytes;
  return counts;
}

std::string DataParallelModel::memory_text() const {
  const auto bytes = [](std::int64_t count) { return human_bytes(static_cast<std::uint64_t>(count)); };
  if (!sharded_) {
    return fmt::format("{} for weights, gradients and optimizer on each rank, and activations",
                       bytes(model_->parameter_count() * 4 * (2 + optimizer_copies_)));
  }
  const FullyShardStatistics statistics = sharded_->statistics();
  std::int64_t rows = 0;
  for (const auto& p : sharded_->parameters()) rows += static_cast<std::int64_t>(p.tensor.nbytes());
  return fmt::format(
      "{} of weights, {} of gradients, {} of optimizer state on this rank; {} for gathered units, then gradients of "
      "units, and activations",
      bytes(statistics.shard_bytes), bytes(statistics.reduced_bytes_kept), bytes(rows * optimizer_copies_),
      bytes(statistics.gathered_bytes));
}

}  // namespace phalanx::train
