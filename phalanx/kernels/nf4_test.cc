// NF4: the codes and scales of bitsandbytes, products with such weights, and parts of a matrix.
#include "phalanx/kernels/nf4.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <vector>

#include "phalanx/layout/wide_rows.h"

namespace phalanx::kernels {
namespace nf4_test {

const std::shared_ptr<const Nf4Tables>& tables() {
  static const auto all = Nf4Tables::make(at::kCPU);
  return all;
}

/// 8 rows of 128, with exact numbers.
at::Tensor numbers() {
  const at::Tensor i = at::arange(8 * 128);
  const at::Tensor size = (i.div(64, "floor") % 5 + 1).to(at::kFloat);
  return ((i * 37 % 101 - 50).to(at::kFloat) / 64 * size).view({8, 128});
}

std::vector<std::int64_t> first(const at::Tensor& bytes, std::int64_t count) {
  const at::Tensor some = bytes.flatten().narrow(0, 0, count).to(at::kLong).contiguous();
  return {some.const_data_ptr<std::int64_t>(), some.const_data_ptr<std::int64_t>() + count};
}

TEST(Nf4, ScalesHaveTheNumbersOfBitsandbytes) {
  const float* scale = tables()->scales.const_data_ptr<float>();
  EXPECT_EQ(scale[0], -0.992968738079071F);
  EXPECT_EQ(scale[63], -0.10703125596046448F);
  EXPECT_EQ(scale[64], -0.09859374910593033F);
  EXPECT_EQ(scale[126], -5.500000384017767e-07F);
  EXPECT_EQ(scale[127], 0.0F);
  EXPECT_EQ(scale[128], 5.500000384017767e-07F);
  EXPECT_EQ(scale[129], 3.250000190746505e-06F);
  EXPECT_EQ(scale[254], 0.992968738079071F);
  EXPECT_EQ(scale[255], 1.0F);
}

// What bitsandbytes 0.50.2 makes of the same numbers (scripts/compare_with_bitsandbytes.py compares larger ones).
TEST(Nf4, HasTheBytesOfBitsandbytes) {
  const Nf4Weight stored = quantise_nf4(numbers(), tables());
  EXPECT_EQ(first(stored.codes, 16),
            (std::vector<std::int64_t>{4, 193, 110, 41, 243, 176, 93, 23, 226, 159, 60, 5, 209, 142, 42, 244}));
  EXPECT_EQ(stored.codes.to(at::kLong).sum().item<std::int64_t>(), 63438);
  EXPECT_EQ(first(stored.absmax, 16),
            (std::vector<std::int64_t>{8, 41, 176, 221, 255, 8, 41, 176, 221, 255, 7, 41, 176, 221, 255, 8}));
  ASSERT_EQ(stored.nested.numel(), 8);
  const at::Tensor nested = stored.nested.view(at::kFloat);
  EXPECT_EQ(nested[0].item<float>(), 1.6611328125F);
  EXPECT_EQ(nested[1].item<float>(), 2.2451171875F);
  const at::Tensor wide = dequantise_nf4(stored, {.columns = 128}, at::kFloat);
  EXPECT_EQ(wide[0][0].item<float>(), -0.7825417518615723F);
  EXPECT_EQ(wide[0][5].item<float>(), 0.5657439231872559F);
  EXPECT_NEAR(wide.to(at::kDouble).abs().sum().item<double>(), 1159.3010923750699, 1e-9);
}

TEST(Nf4, ZerosStayZerosAndLargeBlocksKeepTheirSize) {
  at::Tensor weight = at::zeros({4, 64});
  weight[2].fill_(3.0);
  const at::Tensor wide = dequantise_nf4(quantise_nf4(weight, tables()), {.columns = 64}, at::kFloat);
  EXPECT_TRUE(wide[0].eq(0).all().item<bool>());
  EXPECT_TRUE(at::allclose(wide[2], weight[2], 0.01));
}

// 384 columns are 6 blocks, so that a nested scale's 256 blocks end within a row.
TEST(Nf4, PartsOfAMatrixAreThoseOfTheWhole) {
  const at::Tensor weight = at::randn({128, 384});
  const Nf4Weight whole = quantise_nf4(weight, tables());
  const at::Tensor wide = dequantise_nf4(whole, {.columns = 384}, at::kFloat);
  const Nf4Weight rows{whole.codes.narrow(0, 50, 40), whole.absmax.narrow(0, 50, 40), whole.nested, tables()};
  EXPECT_TRUE(at::equal(dequantise_nf4(rows, {.first_row = 50, .columns = 384}, at::kFloat), wide.narrow(0, 50, 40)));
  const Nf4Weight columns{whole.codes.narrow(1, 64, 32), whole.absmax.narrow(1, 2, 1), whole.nested, tables()};
  EXPECT_TRUE(
      at::equal(dequantise_nf4(columns, {.first_column = 128, .columns = 384}, at::kFloat), wide.narrow(1, 128, 64)));
}

TEST(Nf4, ProductsAndGradientsAreThoseOfTheWideWeight) {
  const Nf4Weight stored = quantise_nf4(at::randn({24, 128}), tables());
  const at::Tensor wide = dequantise_nf4(stored, {.columns = 128}, at::kFloat), bias = at::randn({24});
  const at::Tensor x = at::randn({3, 5, 128}), dy = at::randn({3, 5, 24});
  x.set_requires_grad(true);
  const at::Tensor y = nf4_linear(x, stored, {.columns = 128}, bias);
  EXPECT_TRUE(at::equal(y, at::linear(x, wide, bias)));
  y.backward(dy);
  EXPECT_TRUE(at::equal(x.grad(), at::matmul(dy, wide)));
  EXPECT_EQ(nf4_linear(x.detach().to(at::kBFloat16), stored, {.columns = 128}).scalar_type(), at::kBFloat16);
}

// 8,192 rows of 128 elements are wide at once, and the part begins within a matrix.
TEST(Nf4, SeveralPiecesMakeTheSameProduct) {
  const Nf4Weight whole = quantise_nf4(at::randn({9100, 256}), tables());
  const Nf4Weight stored{whole.codes.narrow(0, 90, 9000).narrow(1, 64, 64),
                         whole.absmax.narrow(0, 90, 9000).narrow(1, 2, 2), whole.nested, tables()};
  const Nf4Part part{.first_row = 90, .first_column = 128, .columns = 256};
  ASSERT_LT(wide_rows_at_once(9000, 128), 9000);
  const at::Tensor wide = dequantise_nf4(whole, {.columns = 256}, at::kFloat).narrow(0, 90, 9000).narrow(1, 128, 128);
  const at::Tensor x = at::randn({5, 128}), dy = at::randn({5, 9000});
  x.set_requires_grad(true);
  const at::Tensor y = nf4_linear(x, stored, part);
  EXPECT_TRUE(at::allclose(y, at::linear(x, wide), 1e-5, 1e-4));
  y.backward(dy);
  EXPECT_TRUE(at::allclose(x.grad(), at::matmul(dy, wide), 1e-5, 1e-3));
}

TEST(Nf4, AGradientOfAGradientIsThatOfTheWideWeight) {
  const Nf4Weight stored = quantise_nf4(at::randn({9000, 128}), tables());
  const at::Tensor wide = dequantise_nf4(stored, {.columns = 128}, at::kFloat);
  const at::Tensor x = at::randn({3, 128}), dy = at::randn({3, 9000});
  x.set_requires_grad(true);
  dy.set_requires_grad(true);
  const auto dx = torch::autograd::grad({nf4_linear(x, stored, {.columns = 128})}, {x}, {dy}, /*retain_graph=*/true,
                                        /*create_graph=*/true);
  const auto found = torch::autograd::grad({dx[0].square().sum()}, {dy});
  EXPECT_TRUE(at::allclose(found[0], 2.0 * dy.detach().mm(wide).mm(wide.t()), 1e-4, 1e-1));
}

}  // namespace nf4_test
}  // namespace phalanx::kernels
