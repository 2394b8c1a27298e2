// Products with a frozen weight in 16 bits: those of the same weight in fp32.
#include "phalanx/kernels/frozen_weight.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/layout/wide_rows.h"

namespace phalanx::kernels {
namespace frozen_weight_test {

TEST(FrozenWeight, ProductsAndGradientsAreThoseOfTheWideWeight) {
  const at::Tensor weight = at::randn({24, 16}).to(at::kBFloat16), bias = at::randn({24}).to(at::kBFloat16);
  const at::Tensor x = at::randn({7, 16}), dy = at::randn({7, 24});
  x.set_requires_grad(true);
  ASSERT_TRUE(is_narrow_weight(x, weight));
  const at::Tensor y = linear(x, weight, bias);
  EXPECT_TRUE(at::equal(y, at::linear(x, weight.to(at::kFloat), bias.to(at::kFloat))));
  y.backward(dy);
  EXPECT_TRUE(at::equal(x.grad(), dy.mm(weight.to(at::kFloat))));
}

// 1,024 rows of 1,024 elements are wide at once. One piece would give the same sums in another order.
TEST(FrozenWeight, SeveralPiecesMakeTheSameProduct) {
  const at::Tensor weight = at::randn({2100, 1024}).to(at::kBFloat16), bias = at::randn({2100});
  const at::Tensor x = at::randn({2, 3, 1024}), dy = at::randn({2, 3, 2100});
  ASSERT_EQ(wide_rows_at_once(2100, 1024), 1024);
  x.set_requires_grad(true);
  const at::Tensor y = linear(x, weight, bias), wide = weight.to(at::kFloat);
  EXPECT_TRUE(at::allclose(y, at::linear(x, wide, bias), 1e-5, 1e-3));
  y.backward(dy);
  EXPECT_TRUE(at::allclose(x.grad(), at::matmul(dy, wide), 1e-5, 1e-3));
}

// The gradient of |dx|^2 by dy is 2 dx W^T.
TEST(FrozenWeight, AGradientOfAGradientIsThatOfTheWideWeight) {
  const at::Tensor weight = at::randn({2100, 1024}).to(at::kBFloat16), wide = weight.to(at::kFloat);
  const at::Tensor x = at::randn({3, 1024}), dy = at::randn({3, 2100});
  x.set_requires_grad(true);
  dy.set_requires_grad(true);
  const auto dx =
      torch::autograd::grad({kernels::linear(x, weight)}, {x}, {dy}, /*retain_graph=*/true, /*create_graph=*/true);
  const auto found = torch::autograd::grad({dx[0].square().sum()}, {dy});
  EXPECT_TRUE(at::allclose(found[0], 2.0 * dy.detach().mm(wide).mm(wide.t()), 1e-4, 1e-1));
}

TEST(FrozenWeight, TrainedOrEqualTypesAreNoNarrowWeights) {
  const at::Tensor x = at::randn({2, 4}), weight = at::randn({3, 4});
  EXPECT_FALSE(is_narrow_weight(x, weight));
  EXPECT_FALSE(is_narrow_weight(x.to(at::kBFloat16), weight.to(at::kBFloat16)));
  EXPECT_FALSE(is_narrow_weight(x, weight.to(at::kBFloat16).set_requires_grad(true)));
}

// So many rows that they are not all wide at once.
TEST(FrozenWeight, TheLossIsThatOfTheWideOutputLayer) {
  const at::Tensor weight = (at::randn({9000, 1024}) * 0.05).to(at::kBFloat16);
  const at::Tensor labels = at::randint(9000, {600}, at::kLong);
  const at::Tensor x = at::randn({600, 1024}), same = x.clone();
  x.set_requires_grad(true);
  same.set_requires_grad(true);
  const at::Tensor loss = linear_cross_entropy(x, weight, labels, 600.0, 0.0);
  const at::Tensor expected = linear_cross_entropy(same, weight.to(at::kFloat), labels, 600.0, 0.0);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
  loss.backward();
  expected.backward();
  EXPECT_TRUE(at::allclose(x.grad(), same.grad(), 1e-4, 1e-8));
}

}  // namespace frozen_weight_test
}  // namespace phalanx::kernels
