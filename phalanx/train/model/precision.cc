#include "phalanx/train/model/precision.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "phalanx/base/log.h"

namespace phalanx::train {
namespace {

bool cpu_has_instructions_for([[maybe_unused]] const std::string& type) {
#if defined(__x86_64__)
  if (type == "bfloat16") return __builtin_cpu_supports("avx512bf16");
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // AVX512-FP16, which not all compilers have a name for
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 23 & 1U) != 0;
#else
  return false;
#endif
}

c10::ScalarType dtype_named(const std::string& type) {
  if (type == "bfloat16") return c10::ScalarType::BFloat16;
  return type == "float16" ? c10::ScalarType::Half : c10::ScalarType::Float;
}

/// What the optimizer keeps, if not all of it is float32: ", no master weights,
/// bfloat16 moments, rounded stochastically".
std::string state_text(const config::TrainConfig& config) {
  const config::TrainConfig::Optimizer& optimizer = config.optimizer;
  const bool is_narrow = config.training.dtype != "float32";
  const bool rounds = optimizer.state_dtype != "float32" || (is_narrow && !optimizer.master_weights);
  std::string text;
  if (is_narrow) text = optimizer.master_weights ? ", float32 master weights" : ", no master weights";
  if (is_narrow || rounds) text += fmt::format(", {} moments", optimizer.state_dtype);
  if (rounds) text += optimizer.stochastic_rounding ? ", rounded stochastically" : ", rounded to nearest";
  return text;
}

}  // namespace

c10::ScalarType weights_dtype(const config::TrainConfig& config) { return dtype_named(config.training.dtype); }

c10::ScalarType moments_dtype(const config::TrainConfig& config) { return dtype_named(config.optimizer.state_dtype); }

std::optional<c10::ScalarType> autocast_dtype(const config::TrainConfig& config, const config::RunPlan& plan) {
  const bool is_kept_in_it = weights_dtype(config) != c10::ScalarType::Float;
  return plan.parallel.is_sharded() || is_kept_in_it ? std::nullopt : sharded_param_dtype(config);
}

std::optional<c10::ScalarType> sharded_param_dtype(const config::TrainConfig& config) {
  const auto type = dtype_named(config.training.mixed_precision_param);
  return type == c10::ScalarType::Float ? std::nullopt : std::optional(type);
}

c10::ScalarType sharded_reduce_dtype(const config::TrainConfig& config) {
  return dtype_named(config.training.mixed_precision_reduce);
}

bool scales_loss(const config::TrainConfig& config) { return config.training.mixed_precision_param == "float16"; }

std::string precision_text(const config::TrainConfig& config, const config::RunPlan& plan) {
  const std::string& type = config.training.mixed_precision_param;
  const std::string scaled = scales_loss(config) ? ", scaled loss" : "";
  const std::string& weights = config.training.dtype;
  const std::string state = state_text(config);
  const std::string& reduce = config.training.mixed_precision_reduce;
  const bool is_sharded = plan.parallel.is_sharded();
  if (weights != "float32") {
    return fmt::format("{} weights, gradients summed in {}{}", weights, is_sharded ? reduce : weights, state);
  }
  if (!is_sharded) {
    return type == "float32" ? type + state
                             : fmt::format("{} matrix products (autocast), float32 weights{}{}", type, scaled, state);
  }
  if (type == "float32" && reduce == type) return type + state;
  return fmt::format("{} gathered from float32 shards, gradients summed in {}{}{}", type, reduce, scaled, state);
}

void set_float32_matmul_precision(const config::TrainConfig& config, c10::Device device) {
  if (!device.is_cpu()) at::globalContext().setAllowTF32CuBLAS(config.training.float32_matmul_precision == "high");
}

void warn_of_slow_precision(const config::TrainConfig& config, c10::Device device) {
  const std::string& type = config.training.mixed_precision_param;
  const bool is_all_float32 = type == "float32" && config.training.dtype == "float32";
  if (is_all_float32 && !device.is_cpu() && config.training.float32_matmul_precision == "highest") {
    log::warn_once(
        "all matrix products are in float32, which GPUs compute at a fraction of their speed: give "
        "training.mixed_precision_param = \"bfloat16\", or training.float32_matmul_precision = \"high\" for TF32 "
        "(Ampere and later)");
  }
  if (type == "float32" || !device.is_cpu() || cpu_has_instructions_for(type)) return;
  log::warn_once(fmt::format(
      "this processor has no {} instructions: mixed_precision_param = \"{}\" will be slower than \"float32\"", type,
      type));
}

}  // namespace phalanx::train
