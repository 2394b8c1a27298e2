// The lines of a training run's log, in torchtitan's format, and the numbers in them.
//
//   step: 10  loss:  4.13012  grad_norm:  0.8312  memory:  1.21GiB(5.00%)  tps: 6,667  tflops: 386.00  mfu: 39.03%
//
// tps is tokens per second of one device. tflops = tps x FLOPs per token (the model's formula) / 1e12. mfu = tflops /
// the device's peak. memory is the most that this rank has used so far. On CUDA it is what the allocator reserved, of
// the card's memory. On the CPU it is resident memory, of the node's (or of the container's limit).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx::report {

struct StepReport {
  std::int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;
  double memory_gib = 0;
  double memory_percent = 0;
  double tokens_per_second = 0;
  double tflops = 0;
  std::optional<double> mfu_percent;  // unset: unknown for this device, shown as N/A
  std::optional<double> loss_scale;   // shown if set
  struct Exposed {
    double of_step = 0;  // percent
    double of_communication = 0;
  };
  std::optional<Exposed> exposed;  // communication that computation did not hide; unset if there is no communication
  struct Preferences {
    double margin = 0, accuracy = 0;  // accuracy: from 0 to 1
  };
  std::optional<Preferences> preferences;
  std::optional<double> expert_load;     // tokens of the fullest expert by the mean, in the most uneven layer
  std::optional<double> expert_dropped;  // share of choices beyond an expert's capacity, from 0 to 1
};

/// Ends with "  exposed: 3.20%(25.00% of comm)", "  loss_scale: 65536", "  expert_load: 1.31",
/// "  expert_dropped: 2.10%" and "  rewards/margins: 0.4121  rewards/accuracies: 0.875" if these are set.
std::string step_line(const StepReport& report);

/// "validate step: 10  loss:  4.02113  memory:  1.21GiB(5.00%)  tps: 12,034", and the same of preferences.
std::string validation_line(const StepReport& report);

/// Dense bf16 peak of a GPU in TFLOP/s, by its product name ("NVIDIA H100 80GB HBM3"); nothing for an unknown GPU.
std::optional<double> gpu_peak_tflops(std::string_view device_name);

}  // namespace phalanx::report
