#include "phalanx/train/model/shard_options.h"

#include <fmt/format.h>

#include "phalanx/train/model/precision.h"

namespace phalanx::train {

FullyShardOptions shard_options(const config::TrainConfig& config) {
  return {.stage = static_cast<int>(config.parallelism.zero_stage),
          .reshard_after_forward = config::reshards_after_forward(config),
          .reshard_group = static_cast<int>(config::reshard_group(config)),
          .offload = config.training.enable_cpu_offload,
          .param_dtype = sharded_param_dtype(config),
          .reduce_dtype = sharded_reduce_dtype(config),
          .output_dtype = at::kFloat,
          .gradient_reduction = ReduceOp::sum};
}

std::string sharding_text(const config::TrainConfig& config) {
  const std::int64_t stage = config.parallelism.zero_stage, group = config::reshard_group(config);
  std::string text = fmt::format("ZeRO-{}", stage);
  if (stage == 3 && !config::reshards_after_forward(config)) {
    const bool has_stages = config.parallelism.pipeline_parallel_degree > 1;
    text += fmt::format(" (gathered until the {})", has_stages ? "step ends" : "backward pass");
  }
  if (stage == 3 && group > 0) text += fmt::format(" (kept by every {} ranks until the backward pass)", group);
  if (config.parallelism.fsdp_reduce_each_microbatch == "never" && stage > 1) text += " (reduced once a step)";
  if (config.training.enable_cpu_offload) text += ", offloaded to the host,";
  return text;
}

}  // namespace phalanx::train
