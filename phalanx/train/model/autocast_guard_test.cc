#include "phalanx/train/model/autocast_guard.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <optional>

namespace phalanx::train {
namespace {

TEST(AutocastGuardTest, ProductsAreInBfloat16WhileItLives) {
  const at::Tensor x = at::randn({2, 3}), weight = at::randn({4, 3});
  {
    const AutocastGuard guard(at::kCPU, at::kBFloat16);
    EXPECT_EQ(at::linear(x, weight).scalar_type(), at::kBFloat16);
  }
  EXPECT_EQ(at::linear(x, weight).scalar_type(), at::kFloat);
  const AutocastGuard off(at::kCPU, std::nullopt);
  EXPECT_EQ(at::linear(x, weight).scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace phalanx::train
