#include "phalanx/report/log_line.h"

#include <gtest/gtest.h>

namespace phalanx::report {
namespace {

TEST(LogLine, IsTorchtitans) {
  EXPECT_EQ(step_line({.step = 10,
                       .loss = 4.130123,
                       .grad_norm = 0.83118,
                       .memory_gib = 1.21,
                       .memory_percent = 5.0,
                       .tokens_per_second = 6667.3,
                       .tflops = 386,
                       .mfu_percent = 39.03}),
            "step: 10  loss:  4.13012  grad_norm:  0.8312  memory:  1.21GiB(5.00%)  tps: 6,667  tflops: 386.00  "
            "mfu: 39.03%");
}

TEST(LogLine, SaysMoreWhereThereIsMore) {
  const std::string line = step_line({.step = 3,
                                      .loss_scale = 65536,
                                      .exposed = StepReport::Exposed{.of_step = 3.2, .of_communication = 25},
                                      .expert_load = 1.314,
                                      .expert_dropped = 0.0213});
  EXPECT_TRUE(line.ends_with(
      "mfu: N/A  exposed: 3.20%(25.00% of comm)  loss_scale: 65536  expert_load: 1.31  expert_dropped: 2.13%"))
      << line;
}

TEST(LogLine, WidthsAndUnknownPeak) {
  EXPECT_EQ(step_line({.step = 1, .loss = 12.5, .grad_norm = 12, .memory_gib = 0.5, .tokens_per_second = 1234567}),
            "step:  1  loss: 12.50000  grad_norm: 12.0000  memory:  0.50GiB(0.00%)  tps: 1,234,567  tflops: 0.00  "
            "mfu: N/A");
  EXPECT_EQ(
      validation_line(
          {.step = 20, .loss = 3.5, .memory_gib = 0.25, .memory_percent = 1, .tokens_per_second = 999, .tflops = 7}),
      "validate step: 20  loss:  3.50000  memory:  0.25GiB(1.00%)  tps: 999");
}

TEST(LogLine, GpuPeaksByName) {
  EXPECT_EQ(gpu_peak_tflops("NVIDIA H100 80GB HBM3"), 989);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA H100 PCIe"), 756);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA H100 NVL"), 835);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA B200"), 2250);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA GB200"), 2500);
  EXPECT_EQ(gpu_peak_tflops("NVIDIA A100-SXM4-80GB"), 312);
  EXPECT_FALSE(gpu_peak_tflops("Tesla T4").has_value());
}

}  // namespace
}  // namespace phalanx::report
