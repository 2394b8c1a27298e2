#include "phalanx/train/precision.h"

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

}  // namespace

std::optional<c10::ScalarType> autocast_dtype(const TrainConfig& config) {
  const std::string& type = config.training.mixed_precision_param;
  if (type == "bfloat16") return c10::ScalarType::BFloat16;
  if (type == "float16") return c10::ScalarType::Half;
  return std::nullopt;
}

bool scales_loss(const TrainConfig& config) { return config.training.mixed_precision_param == "float16"; }

std::string precision_text(const TrainConfig& config) {
  const std::string& type = config.training.mixed_precision_param;
  if (type == "float32") return type;
  return fmt::format("{} matrix products (autocast), float32 weights{}", type,
                     scales_loss(config) ? ", scaled loss" : "");
}

void warn_of_slow_precision(const TrainConfig& config, c10::Device device) {
  const std::string& type = config.training.mixed_precision_param;
  if (type == "float32" || !device.is_cpu() || cpu_has_instructions_for(type)) return;
  log::warn_once(fmt::format(
      "this processor has no {} instructions: mixed_precision_param = \"{}\" will be slower than \"float32\"", type,
      type));
}

}  // namespace phalanx::train
