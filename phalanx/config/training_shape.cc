#include "phalanx/config/training_shape.h"

#include <utility>

#include "phalanx/config/model_config.h"
#include "phalanx/models/config/frozen_parameters.h"

namespace phalanx::config {
namespace {

/// Sequences of the largest forward pass that has no backward pass, as TrainingShape counts them.
std::int64_t evaluated_batch(const TrainConfig& config) {
  const std::int64_t held_out = config.validation.enable ? config.validation.local_batch_size : 0;
  const bool has_reference = !config.dpo.preferences.empty();  // computed in batches as those of training
  if (!has_reference || held_out == -1) return held_out;
  return held_out > config.training.local_batch_size ? held_out : -1;
}

}  // namespace

OptimizerCopies optimizer_copies(const TrainConfig& config) {
  const std::int64_t average = config.ema.decay > 0 ? 1 : 0;
  if (config.optimizer.name == "Muon") return {.others = 2 + average, .matrices = 1 + average};
  const bool has_momentum = config.optimizer.name == "Lion" || config.optimizer.momentum > 0;
  const std::int64_t copies = config.optimizer.name == "AdamW" ? 2 : has_momentum ? 1 : 0;
  const std::int64_t masters = config.training.dtype != "float32" && config.optimizer.master_weights ? 1 : 0;
  const std::int64_t all = copies + average + masters;
  return {.others = all, .matrices = all, .narrow = config.optimizer.state_dtype == "bfloat16" ? 2 : 0};
}

plan::TrainingShape shape_without_layout(const TrainConfig& config) {
  const auto bytes_of = [](const std::string& type) { return type == "float32" ? 4 : 2; };
  plan::TrainingShape shape{.model = model_config(config), .seq = config.training.seq_len};
  shape.validation_batch = evaluated_batch(config);
  const OptimizerCopies copies = optimizer_copies(config);
  shape.weight_bytes = bytes_of(config.training.dtype);
  shape.master_weights = config.optimizer.master_weights;
  const std::int64_t masters = shape.has_masters() ? 1 : 0;  // which the shape counts by itself
  shape.optimizer_copies = copies.others - masters;
  shape.matrix_copies = copies.matrices - masters;
  shape.narrow_copies = copies.narrow;
  shape.adamw_params = config.muon.adamw_params;
  shape.gather_bytes = bytes_of(config.training.mixed_precision_param);
  shape.reduce_bytes = bytes_of(config.training.mixed_precision_reduce);
  shape.offload = config.training.enable_cpu_offload;
  shape.async_checkpoint = config.checkpoint.enable && config.checkpoint.async_mode == "async";
  shape.exports_at_end = config.checkpoint.last_save_in_hf;
  shape.lora = config.lora;
  shape.frozen = models::frozen_parameters(shape.model, config.training.frozen, config.lora);
  return shape;
}

plan::Layout layout_of(const TrainConfig& config, const RunPlan& plan) {
  plan::Layout layout{.parallel = plan.parallel, .batch = plan.local_batch_size, .passes = plan.accumulation_steps};
  if (plan.parallel.pp > 1) {
    // Stages that are balanced by later measurements are treated like those balanced by counting.
    layout.batch = config.parallelism.pipeline_parallel_microbatch_size;
    layout.passes = plan.micro_batches;
  }
  layout.reshard_after_forward = reshards_after_forward(config);
  layout.reshard_group = reshard_group(config);
  layout.reduces_each_microbatch = config.parallelism.fsdp_reduce_each_microbatch != "never";
  layout.recompute_every = recompute_every(config);
  layout.uses_op_sac = uses_op_sac(config);
  layout.schedule = config.parallelism.pipeline_parallel_schedule;
  layout.context_exchange = plan.exchange.name;
  layout.exchange_reason = plan.exchange.reason;
  layout.stages_per_rank = config.parallelism.pipeline_parallel_stages_per_rank;
  return layout;
}

plan::TrainingShape training_shape(const TrainConfig& config, const RunPlan& plan) {
  plan::TrainingShape shape = plan::apply_layout(shape_without_layout(config), layout_of(config, plan));
  if (shape.validation_batch == -1) shape.validation_batch = config.training.local_batch_size;
  return shape;
}

}  // namespace phalanx::config
