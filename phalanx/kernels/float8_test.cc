// Casts to float8 and linear layers of float8 products, against plain formulas.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/float8_linear.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/testing/grad_buffer_test_support.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx::kernels::float8_test {
namespace {

using grad_buffer_testing::Buffered;

constexpr Float8Recipe kRecipes[] = {Float8Recipe::tensorwise, Float8Recipe::rowwise};

/// The nearest number of the format, of two the even one, saturated: by arithmetic alone.
double nearest(double x, int fraction_bits, int smallest_exponent, double largest) {
  if (std::isnan(x) || x == 0) return x;
  const double size = std::min(std::abs(x), largest);
  const int exponent = std::max(std::ilogb(size), smallest_exponent);
  const double step = std::ldexp(1.0, exponent - fraction_bits);
  return std::copysign(std::min(std::nearbyint(size / step) * step, largest), x);
}
double nearest(double x, at::ScalarType to) {
  return to == at::kFloat8_e5m2 ? nearest(x, 2, -14, 57344.0) : nearest(x, 3, -6, 448.0);
}

float plain_scale(double amax, at::ScalarType to, bool power_of_two) {
  const double largest = to == at::kFloat8_e5m2 ? 57344.0 : 448.0;
  const auto scale = static_cast<float>(largest / std::max(amax, 1e-12));
  return power_of_two ? std::ldexp(1.0F, std::ilogb(scale)) : scale;
}

void expect_cast(const at::Tensor& given, Float8Recipe recipe, at::ScalarType to) {
  const Float8Cast made = cast_to_float8(given, {.recipe = recipe, .to = to, .transposed = true});
  const at::Tensor m = given.to(at::kFloat);
  const std::int64_t rows = m.size(0), columns = m.size(1), padded = (rows + 15) / 16 * 16;
  ASSERT_EQ(made.plain.values.sizes(), (std::vector<std::int64_t>{rows, columns}));
  ASSERT_EQ(made.transposed.values.sizes(), (std::vector<std::int64_t>{columns, padded}));
  ASSERT_EQ(made.plain.values.scalar_type(), to);
  const bool by_row = recipe == Float8Recipe::rowwise;
  const at::Tensor plain = made.plain.values.to(at::kFloat), turned = made.transposed.values.to(at::kFloat);
  const auto value = [](const at::Tensor& t, std::int64_t i, std::int64_t j) { return t[i][j].item<float>(); };
  const auto amax_of = [&](const at::Tensor& part) { return part.abs().max().item<double>(); };
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const float row_scale = plain_scale(amax_of(by_row ? m[i] : m), to, by_row);
      const float column_scale = plain_scale(amax_of(by_row ? m.select(1, j) : m), to, by_row);
      ASSERT_EQ(value(plain, i, j), nearest(static_cast<double>(value(m, i, j) * row_scale), to)) << i << " " << j;
      ASSERT_EQ(value(turned, j, i), nearest(static_cast<double>(value(m, i, j) * column_scale), to)) << i << " " << j;
      ASSERT_EQ(value(made.plain.inverse, by_row ? i : 0, 0), 1.0F / row_scale);
      ASSERT_EQ(value(made.transposed.inverse, by_row ? j : 0, 0), 1.0F / column_scale);
    }
  }
  EXPECT_EQ(turned.narrow(1, rows, padded - rows).abs().sum().item<float>(), 0.0F);
}

TEST(Float8Cast, HasTheNumbersOfThePlainFormula) {
  for (const Float8Recipe recipe : kRecipes) {
    for (const at::ScalarType to : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
      for (const at::ScalarType from : {at::kFloat, at::kBFloat16}) {
        expect_cast((at::randn({7, 16}) * 3).to(from), recipe, to);
        expect_cast((at::randn({16, 32}).pow(7)).to(from), recipe, to);  // of very different sizes
      }
    }
  }
}

void expect_same(const Float8Matrix& found, const Float8Matrix& expected) {
  ASSERT_EQ(found.values.defined(), expected.values.defined());
  if (!found.values.defined()) return;
  ASSERT_EQ(found.values.scalar_type(), expected.values.scalar_type());
  EXPECT_TRUE(at::equal(found.values.view(at::kByte), expected.values.view(at::kByte)));
  EXPECT_TRUE(at::equal(found.inverse, expected.inverse));
}

// A GPU's kernels, by their host build, and libtorch's operators.
TEST(Float8Cast, KernelsHaveTheBitsOfTheOperators) {
  for (const Float8Recipe recipe : kRecipes) {
    const bool by_row = recipe == Float8Recipe::rowwise;
    for (const at::ScalarType to : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
      for (const at::ScalarType from : {at::kFloat, at::kBFloat16}) {
        for (const at::ScalarType through : {at::kFloat, at::kBFloat16}) {
          for (const int wanted : {1, 2, 3}) {
            const at::Tensor m = (at::randn({77, 144}) * at::randn({144}).exp()).to(from);
            const Float8CastOptions options{
                .recipe = recipe, .to = to, .plain = wanted != 2, .transposed = wanted != 1, .through = through};
            const Float8Cast expected = cast_to_float8(m, options);
            const HostGpuKernels kernels;
            const Float8Cast found = cast_to_float8(m, options);
            expect_same(found.plain, expected.plain);
            expect_same(found.transposed, expected.transposed);
            EXPECT_TRUE(by_row || at::equal(found.amax, expected.amax));
          }
        }
      }
    }
  }
}

TEST(Float8Cast, ZerosHaveAFiniteScale) {
  for (const Float8Recipe recipe : kRecipes) {
    const Float8Cast made = cast_to_float8(at::zeros({16, 16}), {.recipe = recipe, .transposed = true});
    const at::Tensor y = float8_product(made.plain, made.transposed, {.dtype = at::kFloat});
    EXPECT_TRUE(at::equal(y, at::zeros({16, 16})));
  }
}

// What is not finite must reach the check of the gradients.
TEST(Float8Cast, WhatIsNotFiniteIsNotHidden) {
  for (const Float8Recipe recipe : kRecipes) {
    for (const at::ScalarType to : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
        for (const at::ScalarType from : {at::kFloat, at::kBFloat16}) {
          at::Tensor m = at::randn({16, 16});
          m[3][5] = bad;
          const Float8Cast made = cast_to_float8(m.to(from), {.recipe = recipe, .to = to, .transposed = true});
          const Float8Cast ones = cast_to_float8(at::full({16, 16}, 1.0F), {.recipe = recipe});
          const at::Tensor y = float8_product(made.plain, ones.plain, {.dtype = at::kFloat});
          const at::Tensor yt = float8_product(made.transposed, ones.plain, {.dtype = at::kFloat});
          EXPECT_TRUE(at::isnan(y[3]).all().item<bool>()) << bad;
          EXPECT_TRUE(at::isnan(yt[5]).all().item<bool>()) << bad;
        }
      }
    }
  }
}

TEST(Float8Cast, PartsHaveTheNumbersOfTheWhole) {
  const at::Tensor m = at::randn({32, 64});
  for (const Float8Recipe recipe : kRecipes) {
    const Float8Cast whole = cast_to_float8(m, {.recipe = recipe, .transposed = true});
    for (const int dim : {0, 1}) {
      // Two ranks, one after the other: the second pass has the first one's maxima.
      std::vector<at::Tensor> maxima[2];
      std::size_t call = 0, rank = 0;
      bool is_counted = false;
      const MaxOverRanks over = [&](const at::Tensor& values) {
        if (!is_counted) return maxima[rank].push_back(values.clone());
        values.copy_(at::max(maxima[0][call], maxima[1][call]));
        ++call;
      };
      Float8Cast parts[2];
      for (const bool counted : {false, true}) {
        is_counted = counted;
        for (rank = 0; rank < 2; ++rank) {
          call = 0;
          parts[rank] = cast_to_float8(m.chunk(2, dim)[rank].contiguous(),
                                       {.recipe = recipe,
                                        .transposed = true,
                                        .cut = dim == 0 ? Float8Cut::rows : Float8Cut::columns,
                                        .max_over_ranks = &over});
        }
      }
      EXPECT_TRUE(
          at::equal(at::cat({parts[0].plain.values.view(at::kByte), parts[1].plain.values.view(at::kByte)}, dim),
                    whole.plain.values.view(at::kByte)));
      EXPECT_TRUE(at::equal(
          at::cat({parts[0].transposed.values.view(at::kByte), parts[1].transposed.values.view(at::kByte)}, 1 - dim),
          whole.transposed.values.view(at::kByte)));
    }
    EXPECT_THAT(
        error_text<Error>([&] { cast_to_float8(m, {.recipe = recipe, .transposed = true, .cut = Float8Cut::rows}); }),
        testing::HasSubstr("needs max_over_ranks"));
  }
}

/// The factor's numbers after the cast.
at::Tensor kept(const Float8Matrix& m) { return m.values.to(at::kFloat) * m.inverse; }

std::shared_ptr<const Float8LinearOptions> how(Float8Recipe recipe) {
  return std::make_shared<Float8LinearOptions>(Float8LinearOptions{.recipe = recipe});
}

TEST(Float8Linear, IsTheProductOfTheCastFactors) {
  for (const Float8Recipe recipe : kRecipes) {
    const at::Tensor x = at::randn({3, 7, 32}).set_requires_grad(true), w = at::randn({48, 32}).set_requires_grad(true);
    const at::Tensor dy = at::randn({3, 7, 48});
    const at::Tensor y = float8_linear(x, w, how(recipe));
    y.backward(dy);
    const at::ScalarType narrow = recipe == Float8Recipe::tensorwise ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
    const Float8Cast x8 = cast_to_float8(x.detach().view({21, 32}), {.recipe = recipe, .transposed = true});
    const Float8Cast w8 = cast_to_float8(w.detach(), {.recipe = recipe, .transposed = true});
    const Float8Cast dy8 = cast_to_float8(dy.view({21, 48}), {.recipe = recipe, .to = narrow, .transposed = true});
    EXPECT_TRUE(at::allclose(y.view({21, 48}), kept(x8.plain).mm(kept(w8.plain).t()), 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(x.grad().view({21, 32}), kept(dy8.plain).mm(kept(w8.transposed).t()), 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(w.grad(), kept(dy8.transposed).mm(kept(x8.transposed).t()), 1e-5, 1e-5));
    // And close to the product of the factors themselves.
    const auto error = (y - at::matmul(x, w.t())).norm() / y.norm();
    EXPECT_LT(error.item<double>(), 0.05);
    EXPECT_GT(error.item<double>(), 0.005);
  }
}

TEST(Float8Linear, WiderWeightsAreRoundedToAutocastsTypeFirst) {
  for (const Float8Recipe recipe : kRecipes) {
    const at::Tensor x = at::randn({32, 32}), w = at::randn({16, 32}).set_requires_grad(true);
    const at::Tensor narrow = w.detach().to(at::kBFloat16).set_requires_grad(true);
    const at::Tensor x1 = x.clone().set_requires_grad(true), x2 = x.to(at::kBFloat16).set_requires_grad(true);
    at::Tensor y;
    {
      const AutocastScope scope(at::kCPU, {.enabled = true, .dtype = at::kBFloat16});
      y = float8_linear(x1, w, how(recipe));
    }
    const at::Tensor expected = float8_linear(x2, narrow, how(recipe));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(y, expected));
    y.square().sum().backward();
    expected.square().sum().backward();
    EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(x1.grad().to(at::kBFloat16), x2.grad()));
    EXPECT_TRUE(at::equal(w.grad().to(at::kBFloat16), narrow.grad()));
  }
}

TEST(Float8Linear, LayersThatShareTheirInputAreThoseLayers) {
  for (const Float8Recipe recipe : kRecipes) {
    const at::Tensor x = at::randn({5, 32}).set_requires_grad(true), other = x.detach().clone().set_requires_grad(true);
    std::vector<at::Tensor> w, v;
    for (const int rows : {32, 16, 48}) {
      w.push_back(at::randn({rows, 32}).set_requires_grad(true));
      v.push_back(w.back().detach().clone().set_requires_grad(true));
    }
    const auto together = float8_linears(x, w, how(recipe));
    ASSERT_EQ(together.size(), 3U);
    at::Tensor loss = at::zeros({}), separate = at::zeros({});
    for (std::size_t i = 0; i < 3; ++i) {
      const at::Tensor y = float8_linear(other, v[i], how(recipe));
      EXPECT_TRUE(at::equal(together[i], y));
      loss = loss + together[i].square().sum();
      separate = separate + y.square().sum();
    }
    loss.backward();
    separate.backward();
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(w[i].grad(), v[i].grad()));
    EXPECT_TRUE(at::allclose(x.grad(), other.grad(), 1e-5, 1e-5));
  }
}

TEST(Float8Linear, TheWeightsGradientIsWrittenIntoItsBufferThenAddedTo) {
  for (const Float8Recipe recipe : kRecipes) {
    Buffered w({48, 32});
    const at::Tensor plain = w.weight.detach().clone().set_requires_grad(true), x = at::randn({9, 32});
    float8_linear(x, plain, how(recipe)).square().sum().backward();
    float8_linear(x, w.weight, how(recipe)).square().sum().backward();
    ASSERT_TRUE(w.is_in_buffer());
    EXPECT_EQ(w.events, 1);
    EXPECT_TRUE(at::equal(w.buffer, plain.grad()));
    float8_linear(x, w.weight, how(recipe)).square().sum().backward();
    ASSERT_TRUE(w.is_in_buffer());
    EXPECT_TRUE(at::equal(w.buffer, 2 * plain.grad()));
  }
}

TEST(Float8Linear, TheWeightsGradientMayComeLater) {
  for (const Float8Recipe recipe : kRecipes) {
    Buffered w({48, 32});
    const at::Tensor plain = w.weight.detach().clone().set_requires_grad(true);
    const at::Tensor x = at::randn({9, 32}).set_requires_grad(true);
    float8_linear(x, plain, how(recipe)).square().sum().backward();
    const auto queue = std::make_shared<WeightGradientQueue>();
    queue->set_deferring(true);
    at::Tensor y;
    {
      const WeightGradientQueue::Scope scope(queue, {});
      y = float8_linear(x, w.weight, how(recipe));
    }
    y.square().sum().backward();
    EXPECT_EQ(w.events, 0);
    queue->flush({});
    EXPECT_EQ(w.events, 1);
    EXPECT_TRUE(at::equal(w.weight.grad(), plain.grad()));
  }
}

TEST(Float8Linear, NoRowsAndWhatIsRefused) {
  const at::Tensor w = at::randn({16, 32}).set_requires_grad(true);
  const at::Tensor none = float8_linear(at::zeros({0, 32}), w, how(Float8Recipe::tensorwise));
  EXPECT_EQ(none.sizes(), (std::vector<std::int64_t>{0, 16}));
  const at::Tensor y = float8_linear(at::randn({4, 32}), w, how(Float8Recipe::tensorwise));
  EXPECT_THAT(error_text<Error>(
                  [&] { torch::autograd::grad({y.sum()}, {w}, {}, /*retain_graph=*/true, /*create_graph=*/true); }),
              testing::HasSubstr("have no second derivative"));
  EXPECT_THAT(error_text<Error>([&] { float8_linears(y, {}, how(Float8Recipe::tensorwise)); }),
              testing::HasSubstr("0 weights; expected one to three"));
  EXPECT_EQ(float8_problem(at::kCPU, Float8Recipe::rowwise), "");
}

}  // namespace
}  // namespace phalanx::kernels::float8_test
