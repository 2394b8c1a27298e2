#include "phalanx/report/log_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "phalanx/base/human.h"

namespace phalanx::report {
namespace {

std::string preferences_text(const std::optional<StepReport::Preferences>& of) {
  return of ? fmt::format("  rewards/margins: {:.4f}  rewards/accuracies: {:.3f}", of->margin, of->accuracy) : "";
}

std::string tokens_per_second(double value) { return with_commas(std::llround(std::max(0.0, value))); }

}  // namespace

std::string step_line(const StepReport& r) {
  const std::string mfu = r.mfu_percent ? fmt::format("{:.2f}%", *r.mfu_percent) : "N/A";
  std::string line = fmt::format(
      "step: {:2}  loss: {:8.5f}  grad_norm: {:7.4f}  memory: {:5.2f}GiB({:.2f}%)  tps: {}  "
      "tflops: {:.2f}  mfu: {}",
      r.step, r.loss, r.grad_norm, r.memory_gib, r.memory_percent, tokens_per_second(r.tokens_per_second), r.tflops,
      mfu);
  if (r.exposed) {
    line += fmt::format("  exposed: {:.2f}%({:.2f}% of comm)", r.exposed->of_step, r.exposed->of_communication);
  }
  if (r.loss_scale) line += fmt::format("  loss_scale: {}", *r.loss_scale);
  if (r.expert_load) line += fmt::format("  expert_load: {:.2f}", *r.expert_load);
  if (r.expert_dropped) line += fmt::format("  expert_dropped: {:.2f}%", 100 * *r.expert_dropped);
  return line + preferences_text(r.preferences);
}

std::string validation_line(const StepReport& r) {
  return fmt::format("validate step: {:2}  loss: {:8.5f}  memory: {:5.2f}GiB({:.2f}%)  tps: {}", r.step, r.loss,
                     r.memory_gib, r.memory_percent, tokens_per_second(r.tokens_per_second)) +
         preferences_text(r.preferences);
}

std::optional<double> gpu_peak_tflops(std::string_view name) {
  struct Peak {
    std::string_view part;     // of the device's name
    std::string_view variant;  // another part of it, unless empty
    double tflops;
  };
  // Dense bf16 figures of the vendors' data sheets; the first row that matches counts.
  static constexpr Peak kPeaks[] = {
      {"A100", "", 312},  {"H100", "NVL", 835}, {"H100", "PCIe", 756}, {"H100", "", 989},
      {"H200", "", 989},  {"GH200", "", 989},   {"GB200", "", 2500},   {"GB300", "", 2500},
      {"B200", "", 2250}, {"B300", "", 2250},   {"MI300X", "", 1300},  {"MI355X", "", 2500},
  };
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  for (const Peak& peak : kPeaks) {
    if (has(peak.part) && has(peak.variant)) return peak.tflops;
  }
  return std::nullopt;
}

}  // namespace phalanx::report
