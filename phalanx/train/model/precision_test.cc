#include "phalanx/train/model/precision.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <string>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/config.h"

namespace phalanx::train {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class PrecisionTest : public ::testing::Test {
 protected:
  ~PrecisionTest() override { at::globalContext().setAllowTF32CuBLAS(false); }

  static config::TrainConfig with(const std::string& dtype, const std::string& products) {
    config::TrainConfig config;
    config.training.mixed_precision_param = dtype;
    config.training.float32_matmul_precision = products;
    return config;
  }
  static std::string warning_of(const config::TrainConfig& config) {
    ::testing::internal::CaptureStderr();
    warn_of_slow_precision(config, c10::Device(c10::kCUDA, 0));
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(PrecisionTest, OfProductsOnDevicesIsThatOfTheConfiguration) {
  const auto is_in_tf32 = [] { return at::globalContext().allowTF32CuBLAS(); };
  set_float32_matmul_precision(with("float32", "high"), c10::Device(c10::kCUDA, 0));
  EXPECT_TRUE(is_in_tf32());
  set_float32_matmul_precision(with("float32", "highest"), c10::Device(c10::kCUDA, 0));
  EXPECT_FALSE(is_in_tf32()) << "also behind a run in TF32";
  set_float32_matmul_precision(with("float32", "high"), c10::Device(c10::kCPU));
  EXPECT_FALSE(is_in_tf32());
}

TEST_F(PrecisionTest, AGpuThatComputesAllInFloat32IsAWarning) {
  EXPECT_THAT(warning_of(with("float32", "high")), IsEmpty());
  EXPECT_THAT(warning_of(with("bfloat16", "highest")), IsEmpty());
  EXPECT_THAT(warning_of(with("float32", "highest")), HasSubstr("training.float32_matmul_precision = \"high\""));
}

}  // namespace
}  // namespace phalanx::train
