// The differentiable functions that use Phalanx's own GPU kernels, over the kernels' host build: values and gradients
// against ATen operators in float64, in float32, bfloat16 and float16 and under autocast.
#include "phalanx/kernels/gpu_launch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/fused_linear.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/kernels/rms_norm.h"
#include "phalanx/kernels/rotary.h"
#include "phalanx/kernels/swiglu_feed_forward.h"
#include "phalanx/kernels/testing/grad_buffer_test_support.h"

namespace phalanx {
namespace {

using grad_buffer_testing::Buffered;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

struct Precision {
  const char* name;
  at::ScalarType inputs;
  bool autocast;
  double
      tolerance;  // of the relative error in the 2-norm; of 16 bits some roundings of 2^-9 (bfloat16), 2^-12 (float16)
};
const Precision kPrecisions[] = {{"float32", at::kFloat, false, 2e-6},
                                 {"bfloat16", at::kBFloat16, false, 8e-3},
                                 {"float16", at::kHalf, false, 1e-3},
                                 {"autocast", at::kFloat, true, 8e-3}};

/// Outputs, then the gradients of all inputs, for fixed gradients of the outputs,
/// of type `direction`, that have no zeros.
Tensors values_and_gradients(const Function& function, const Tensors& inputs, at::ScalarType type,
                             at::ScalarType direction) {
  Tensors leaves, found;
  for (const at::Tensor& input : inputs) leaves.push_back(input.to(type).clone().requires_grad_());
  Tensors directions;
  const Tensors outputs = function(leaves);
  for (const at::Tensor& y : outputs) {
    found.push_back(y.detach());
    const at::Tensor wave = at::arange(y.numel(), at::TensorOptions(at::kDouble)).mul(0.7).add(0.5).sin();
    directions.push_back(wave.view(y.sizes()).to(direction).to(y.scalar_type()));
  }
  torch::autograd::backward(outputs, directions);
  for (const at::Tensor& leaf : leaves) found.push_back(leaf.grad());
  return found;
}

class GpuFunction : public testing::TestWithParam<Precision> {
 protected:
  void SetUp() override { at::manual_seed(1); }

  /// Inputs are rounded to the type first, so that both compute with the same numbers.
  void expect_equal(const Function& ours, const Function& reference, Tensors inputs) {
    const Precision& precision = GetParam();
    for (at::Tensor& input : inputs) input = input.to(precision.inputs).to(at::kDouble);
    const at::ScalarType direction = precision.autocast ? at::kBFloat16 : precision.inputs;
    Tensors found;
    {
      const HostGpuKernels kernels;
      const kernels::AutocastScope autocast(at::kCPU, {.enabled = precision.autocast, .dtype = at::kBFloat16});
      found = values_and_gradients(ours, inputs, precision.inputs, direction);
    }
    const Tensors expected = values_and_gradients(reference, inputs, at::kDouble, direction);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      const double error = (found[i].to(at::kDouble) - expected[i]).norm().item<double>();
      EXPECT_LE(error, precision.tolerance * expected[i].norm().item<double>()) << "output or gradient " << i;
    }
  }
  using HostGpuKernels = kernels::HostGpuKernels;
};

at::Tensor reference_norm(const at::Tensor& x, const at::Tensor& weight) {
  return x * (x * x).mean(-1, true).add(1e-5).rsqrt() * weight;
}

TEST_P(GpuFunction, RmsNorm) {
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{1, 2}, {2, 131, 33}, {40, 256}}) {
    expect_equal([](const Tensors& in) -> Tensors { return {kernels::rms_norm(in[0], in[1], 1e-5)}; },
                 [](const Tensors& in) -> Tensors { return {reference_norm(in[0], in[1])}; },
                 {at::randn(shape) * 3.0, at::randn({shape.back()})});
  }
}

TEST_P(GpuFunction, RmsNormOfASum) {
  for (const std::int64_t dim : {33, 256}) {
    expect_equal(
        [](const Tensors& in) -> Tensors {
          const auto [h, y] = kernels::add_rms_norm(in[0], in[1], in[2], 1e-5);
          return {h, y};
        },
        [](const Tensors& in) -> Tensors {
          return {in[0] + in[1], reference_norm(in[0] + in[1], in[2])};
        },
        {at::randn({2, 13, dim}), at::randn({2, 13, dim}), at::randn({dim})});
  }
}

// A residual layer: what comes before the norm is used beside it.
TEST_P(GpuFunction, RmsNormBesideItsInput) {
  expect_equal(
      [](const Tensors& in) -> Tensors {
        const auto [h, y] = kernels::add_rms_norm(in[0] * 2, {}, in[1], 1e-5);
        return {h * 3 + y, h};
      },
      [](const Tensors& in) -> Tensors {
        const at::Tensor h = in[0] * 2;
        return {h * 3 + reference_norm(h, in[1]), h};
      },
      {at::randn({2, 13, 40}), at::randn({40})});
}

TEST_P(GpuFunction, SeveralLinears) {
  for (const bool adjacent : {false, true}) {
    expect_equal(
        [&](const Tensors& in) -> Tensors {
          if (adjacent) kernels::make_adjacent({in[1], in[2], in[3]});
          return kernels::linears(in[0], {in[1], in[2], in[3]});
        },
        [](const Tensors& in) -> Tensors {
          return {at::linear(in[0], in[1]), at::linear(in[0], in[2]), at::linear(in[0], in[3])};
        },
        {at::randn({2, 9, 6}), at::randn({8, 6}), at::randn({4, 6}), at::randn({4, 6})});
  }
}

TEST_P(GpuFunction, FeedForwardOfAdjacentWeights) {
  expect_equal(
      [](const Tensors& in) -> Tensors {
        kernels::make_adjacent({in[1], in[3]});
        return {kernels::swiglu_feed_forward(in[0], in[1], in[2], in[3])};
      },
      [](const Tensors& in) -> Tensors {
        return {at::linear(kernels::swiglu_reference(at::linear(in[0], in[1]), at::linear(in[0], in[3])), in[2])};
      },
      {at::randn({2, 9, 6}), at::randn({10, 6}), at::randn({6, 10}), at::randn({10, 6})});
}

TEST_P(GpuFunction, RotaryOfQueriesAndKeys) {
  const at::Tensor angles = at::rand({3, 7, 5}) * 6.0;
  for (const bool per_row : {false, true}) {
    const at::Tensor table = per_row ? angles : angles[0].contiguous();
    const at::Tensor cos = table.cos(), sin = table.sin();
    expect_equal(
        [&](const Tensors& in) -> Tensors {
          const auto [q, k] = kernels::apply_rotary(in[0].transpose(1, 2), in[1].transpose(1, 2), cos, sin);
          return {q, k};
        },
        [&](const Tensors& in) -> Tensors {
          return {kernels::apply_rotary_reference(in[0].transpose(1, 2), cos, sin),
                  kernels::apply_rotary_reference(in[1].transpose(1, 2), cos, sin)};
        },
        {at::randn({3, 7, 4, 10}), at::randn({3, 7, 2, 10})});
  }
}

TEST_P(GpuFunction, Swiglu) {
  expect_equal([](const Tensors& in) -> Tensors { return {kernels::swiglu(in[0], in[1])}; },
               [](const Tensors& in) -> Tensors { return {kernels::swiglu_reference(in[0], in[1])}; },
               {at::randn({3, 5, 9}), at::randn({3, 5, 9})});
}

TEST_P(GpuFunction, SwigluInPreallocatedMemory) {
  const at::ScalarType type = GetParam().inputs;
  const at::Tensor gate = at::randn({5, 9}).to(type), up = at::randn({5, 9}).to(type), dy = at::randn({5, 9}).to(type);
  const at::Tensor y = at::empty_like(gate), dgate = at::empty_like(gate), dup = at::empty_like(gate),
                   again = at::empty_like(gate);
  {
    const HostGpuKernels kernels;
    kernels::swiglu_into(gate, up, y);
    kernels::swiglu_backward_into(gate, up, dy, dgate, dup, again);
  }
  const at::Tensor g = gate.to(at::kDouble).requires_grad_(), u = up.to(at::kDouble).requires_grad_();
  const at::Tensor expected = kernels::swiglu_reference(g, u);
  expected.backward(dy.to(at::kDouble));
  const auto expect_near = [](const at::Tensor& found, const at::Tensor& wanted) {
    EXPECT_LE((found.to(at::kDouble) - wanted).norm().item<double>(),
              GetParam().tolerance * wanted.norm().item<double>());
  };
  expect_near(y, expected.detach());
  expect_near(again, expected.detach());
  expect_near(dgate, g.grad());
  expect_near(dup, u.grad());
}

TEST_P(GpuFunction, FeedForward) {
  expect_equal(
      [](const Tensors& in) -> Tensors { return {kernels::swiglu_feed_forward(in[0], in[1], in[2], in[3])}; },
      [](const Tensors& in) -> Tensors {
        return {at::linear(kernels::swiglu_reference(at::linear(in[0], in[1]), at::linear(in[0], in[3])), in[2])};
      },
      {at::randn({2, 9, 6}), at::randn({11, 6}) * 0.4, at::randn({6, 11}) * 0.4, at::randn({11, 6}) * 0.4});
}

TEST_P(GpuFunction, LinearWithBias) {
  expect_equal([](const Tensors& in) -> Tensors { return {kernels::linear(in[0], in[1], in[2])}; },
               [](const Tensors& in) -> Tensors { return {at::linear(in[0], in[1], in[2])}; },
               {at::randn({2, 9, 6}), at::randn({11, 6}), at::randn({11})});
}

TEST_P(GpuFunction, LinearCrossEntropy) {
  const at::Tensor labels = at::randint(0, 37, {3, 7}, at::TensorOptions(at::kLong));
  expect_equal([&](const Tensors& in) -> Tensors { return {kernels::linear_cross_entropy(in[0], in[1], labels)}; },
               [&](const Tensors& in) -> Tensors {
                 return {at::cross_entropy_loss(at::linear(in[0], in[1]).flatten(0, 1), labels.flatten())};
               },
               {at::randn({3, 7, 12}), at::randn({37, 12})});
  constexpr double kWeight = 0.02;
  expect_equal(
      [&](const Tensors& in) -> Tensors {
        return {kernels::linear_cross_entropy(in[0], in[1], labels, std::nullopt, kWeight)};
      },
      [&](const Tensors& in) -> Tensors {
        const at::Tensor logits = at::linear(in[0], in[1]).flatten(0, 1);
        return {at::cross_entropy_loss(logits, labels.flatten()) +
                kWeight * at::logsumexp(logits, 1).square().mean().to(at::kFloat)};
      },
      {at::randn({3, 7, 12}), at::randn({37, 12})});
  const at::Tensor weights = at::randn({3, 7});
  const auto losses_of = [&](const at::Tensor& logits) {
    return at::cross_entropy_loss(logits.flatten(0, 1).to(at::kFloat), labels.flatten(), {}, at::Reduction::None);
  };
  expect_equal(
      [&](const Tensors& in) -> Tensors {
        // The sum of both: the second has no gradient.
        return {kernels::linear_cross_entropy(in[0], in[1], labels, 3.0, 0, weights) +
                kernels::linear_token_losses(in[0], in[1], labels).sum()};
      },
      [&](const Tensors& in) -> Tensors {
        const at::Tensor losses = losses_of(at::linear(in[0], in[1]));
        return {(losses * weights.flatten()).sum() / 3.0 + losses.detach().sum()};
      },
      {at::randn({3, 7, 12}), at::randn({37, 12})});
  // With an adapter.
  expect_equal(
      [&](const Tensors& in) -> Tensors {
        const kernels::LowRank low{in[2], in[3]};
        return {kernels::linear_cross_entropy(in[0], in[1], labels, 3.0, 0, weights, low) +
                kernels::linear_token_losses(in[0], in[1], labels, low).sum()};
      },
      [&](const Tensors& in) -> Tensors {
        const at::Tensor losses = losses_of(at::linear(in[0], in[1]) + at::linear(in[2], in[3]));
        return {(losses * weights.flatten()).sum() / 3.0 + losses.detach().sum()};
      },
      {at::randn({3, 7, 12}), at::randn({37, 12}), at::randn({3, 7, 2}), at::randn({37, 2})});
}

INSTANTIATE_TEST_SUITE_P(Precisions, GpuFunction, testing::ValuesIn(kPrecisions),
                         [](const auto& info) { return info.param.name; });

// A factor of 2^16 on gradients of about 2^-18: none of them is lost, as none has been divided by the rows in 16 bits.
TEST(GpuCrossEntropy, SmallGradientsInFloat16AreKept) {
  at::manual_seed(1);
  constexpr std::int64_t kRows = 64, kVocab = 4096;
  const at::Tensor x = (at::randn({kRows, 8}) * 0.01).to(at::kHalf).requires_grad_();
  const at::Tensor weight = (at::randn({kVocab, 8}) * 0.01).to(at::kHalf).requires_grad_();
  const at::Tensor labels = at::randint(0, kVocab, {kRows}, at::TensorOptions(at::kLong));
  const kernels::HostGpuKernels kernels;
  (kernels::linear_cross_entropy(x, weight, labels) * 65536.0).backward();
  EXPECT_EQ((weight.grad() == 0).sum().item<std::int64_t>(), 0);
}

TEST(GpuCrossEntropy, AWrongLabelGivesNan) {
  const at::Tensor x = at::randn({3, 4}), weight = at::randn({5, 4});
  const kernels::HostGpuKernels kernels;
  for (const std::int64_t wrong : {std::int64_t{5}, std::int64_t{-1}}) {
    const at::Tensor labels = at::tensor({std::int64_t{0}, wrong, std::int64_t{4}});
    EXPECT_TRUE(std::isnan(kernels::linear_cross_entropy(x, weight, labels).item<float>())) << wrong;
  }
}

// libtorch's mean over the labels that count; and gradients of a wrong label spoil the step on all ranks.
TEST(GpuCrossEntropy, IgnoredLabelsAreLeftOut) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({5, 4}).requires_grad_(), weight = at::randn({7, 4}).requires_grad_();
  const at::Tensor labels = at::tensor({3, -100, 0, -100, 6}, at::kLong);
  at::cross_entropy_loss(at::linear(x, weight), labels).backward();
  const at::Tensor dx = x.grad().clone(), dweight = weight.grad().clone();
  x.mutable_grad().reset();
  weight.mutable_grad().reset();
  const kernels::HostGpuKernels kernels;
  kernels::linear_cross_entropy(x, weight, labels).backward();
  EXPECT_TRUE(at::allclose(x.grad(), dx, 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(weight.grad(), dweight, 1e-5, 1e-6));
  kernels::linear_cross_entropy(x, weight, at::tensor({3, 1, 7, 1, 6}, at::kLong)).backward();
  EXPECT_TRUE(x.grad()[2].isnan().all().item<bool>());
  EXPECT_TRUE(weight.grad().isnan().any().item<bool>());
}

TEST(GpuCrossEntropy, LabelsOfAnotherShapeAreAnError) {
  const at::Tensor x = at::randn({3, 4}), weight = at::randn({5, 4});
  const kernels::HostGpuKernels kernels;
  EXPECT_THAT(error_text<Error>([&] {
                kernels::linear_cross_entropy(x, weight, at::tensor({0, 1}, at::kLong));
              }),
              testing::HasSubstr("labels are Long [2] on cpu; expected int64, one for each row of [3, 4], on cpu"));
}

TEST(GpuFunctions, ASecondDerivativeIsAnError) {
  const at::Tensor x = at::randn({3, 4}).requires_grad_(), weight = at::randn({4}).requires_grad_();
  const kernels::HostGpuKernels kernels;
  const at::Tensor y = kernels::rms_norm(x, weight, 1e-5).square().sum();
  EXPECT_THAT(error_text<Error>([&] { torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true); }),
              testing::HasSubstr("rms_norm on the GPU has no second derivative"));
}

// As of a pair of answers that a model already tells apart. A loss scale comes after they have been multiplied.
TEST(GpuFunctions, SmallWeightsOfTokensAreNotLostIn16Bits) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({6, 8}), weight = at::randn({300, 8}) * 0.1, of_tokens = at::rand({6}) * 1e-5;
  const at::Tensor labels = at::randint(0, 300, {6}, at::TensorOptions(at::kLong));
  const auto gradients = [&](at::ScalarType type) -> Tensors {
    const at::Tensor in = x.to(type, false, true).requires_grad_(), w = weight.to(type, false, true).requires_grad_();
    (kernels::linear_cross_entropy(in, w, labels, 1.0, 0, of_tokens) * 0x1p16).backward();
    return {in.grad().to(at::kFloat), w.grad().to(at::kFloat)};
  };
  const Tensors expected = gradients(at::kFloat);
  const kernels::HostGpuKernels kernels;
  const Tensors found = gradients(at::kHalf);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LT((found[i] - expected[i]).norm().item<double>(), 5e-3 * expected[i].norm().item<double>()) << i;
  }
}
// Frozen weights get no gradient, and neither does an input that needs none.
TEST(GpuFunctions, FrozenWeightsAndInputs) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({5, 6}), w1 = at::randn({9, 6}), w2 = at::randn({6, 9}).requires_grad_(),
                   w3 = at::randn({9, 6});
  const kernels::HostGpuKernels kernels;
  kernels::swiglu_feed_forward(x, w1, w2, w3).sum().backward();
  EXPECT_TRUE(w2.grad().defined());
  EXPECT_FALSE(w1.grad().defined());
  EXPECT_FALSE(x.grad().defined());
}

TEST(GpuCrossEntropy, ASecondBackwardIsAnError) {
  const at::Tensor x = at::randn({3, 4}).requires_grad_(), weight = at::randn({5, 4}).requires_grad_();
  const kernels::HostGpuKernels kernels;
  const at::Tensor loss = kernels::linear_cross_entropy(x, weight, at::tensor({0, 1, 4}, at::kLong));
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(error_text<Error>([&] { loss.backward(); }), testing::HasSubstr("a second backward"));
}

// Adjacent weights have adjacent gradients, in buffers or without, added to or not; a frozen weight has none.
TEST(GpuStackedWeights, GradientsAreThoseOfSeparateProducts) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({5, 6});
  const kernels::HostGpuKernels kernels;
  const auto step = [&](const Tensors& weights) {
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      const Tensors y = kernels::linears(x + micro_batch, weights);
      (y[0].square().sum() + y[1].square().sum() + y[2].square().sum()).backward();
    }
  };
  const std::vector<std::int64_t> rows = {4, 2, 2};
  Tensors separate, stacked, buffered, buffers;
  std::vector<GradReadySubscription> subscriptions;
  for (const std::int64_t n : rows) {
    const at::Tensor values = at::randn({n, 6});
    for (Tensors* const set : {&separate, &stacked, &buffered}) set->push_back(values.clone().requires_grad_());
  }
  kernels::make_adjacent(stacked);
  kernels::make_adjacent(buffered);
  const at::Tensor all = at::full({8, 6}, std::numeric_limits<float>::quiet_NaN());
  for (std::size_t i = 0, first = 0; i < 3; first += static_cast<std::size_t>(rows[i]), ++i) {
    buffers.push_back(all.narrow(0, static_cast<std::int64_t>(first), rows[i]).variable_data());
    subscriptions.push_back(on_grad_ready(buffered[i], [](const at::Tensor&) {}));
    set_grad_buffer(buffered[i], buffers[i]);
  }
  for (const Tensors& set : {separate, stacked, buffered}) step(set);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::allclose(stacked[i].grad(), separate[i].grad(), 1e-6, 1e-6));
    EXPECT_TRUE(at::allclose(buffered[i].grad(), separate[i].grad(), 1e-6, 1e-6));
    EXPECT_TRUE(buffered[i].grad().is_same(buffers[i]));
  }
  EXPECT_TRUE(kernels::are_adjacent({stacked[0].grad(), stacked[1].grad(), stacked[2].grad()}));
  stacked[1].set_requires_grad(false).mutable_grad().reset();
  for (const std::size_t i : {0, 2}) stacked[i].mutable_grad().reset();
  step(stacked);
  EXPECT_FALSE(stacked[1].grad().defined());
  EXPECT_TRUE(at::allclose(stacked[2].grad(), separate[2].grad(), 1e-6, 1e-6));
}

// Under autocast the gradients of float32 weights go straight into the buffers that are offered for them.
TEST(GpuAutocast, WeightGradientsAreInTheirBuffers) {
  at::manual_seed(1);
  Buffered linear({6, 6}), q({4, 6}), k({2, 6}), v({2, 6}), w1({9, 6}), w2({6, 9}), w3({9, 6}), head({17, 6});
  const at::Tensor x = at::randn({5, 6}), labels = at::randint(0, 17, {5}, at::TensorOptions(at::kLong));
  const kernels::HostGpuKernels kernels;
  const kernels::AutocastScope autocast(at::kCPU, {.enabled = true, .dtype = at::kBFloat16});
  const at::Tensor h = kernels::swiglu_feed_forward(kernels::linear(x, linear.weight), w1.weight, w2.weight, w3.weight);
  const std::vector<at::Tensor> qkv = kernels::linears(h, {q.weight, k.weight, v.weight});
  (kernels::linear_cross_entropy(h, head.weight, labels) + qkv[0].sum() + qkv[1].sum() + qkv[2].sum()).backward();
  for (const Buffered* one : {&linear, &q, &k, &v, &w1, &w2, &w3, &head}) {
    EXPECT_TRUE(one->is_in_buffer());
    EXPECT_EQ(one->events, 1);
    EXPECT_TRUE(one->buffer.isfinite().all().item<bool>());
  }
}

TEST(GpuAutocast, NormalisedValuesHaveAutocastsType) {
  const kernels::HostGpuKernels kernels;
  const at::Tensor x = at::randn({3, 8}), weight = at::randn({8});
  EXPECT_EQ(kernels::rms_norm(x, weight, 1e-5).scalar_type(), at::kFloat);
  const kernels::AutocastScope autocast(at::kCPU, {.enabled = true, .dtype = at::kBFloat16});
  EXPECT_EQ(kernels::rms_norm(x, weight, 1e-5).scalar_type(), at::kBFloat16);
}

}  // namespace
}  // namespace phalanx
