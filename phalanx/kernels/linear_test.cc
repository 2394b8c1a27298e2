// Weight gradients that go directly into an offered buffer: the same values as autograd's own way, and autograd's own
// way wherever autograd must see them.
#include "phalanx/kernels/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/swiglu_feed_forward.h"
#include "phalanx/kernels/testing/grad_buffer_test_support.h"

namespace phalanx {
namespace {

using grad_buffer_testing::Buffered;
using grad_buffer_testing::gradient;
using grad_buffer_testing::parameter;

TEST(BufferedLinear, TheGradientIsWrittenThenAddedTo) {
  Buffered w({3, 5});
  const at::Tensor x = parameter({2, 4, 5}), b = parameter({3});
  const at::Tensor expected = gradient(at::linear(x, w.weight, b).square().sum(), w.weight);
  const at::Tensor dx = gradient(at::linear(x, w.weight, b).square().sum(), x);
  const at::Tensor db = gradient(at::linear(x, w.weight, b).square().sum(), b);

  const at::Tensor y = kernels::linear(x, w.weight, b);
  EXPECT_TRUE(at::equal(y, at::linear(x, w.weight, b)));
  y.square().sum().backward();
  ASSERT_TRUE(w.is_in_buffer());
  EXPECT_EQ(w.events, 1);
  EXPECT_TRUE(at::allclose(w.buffer, expected));
  EXPECT_TRUE(at::allclose(x.grad(), dx));
  EXPECT_TRUE(at::allclose(b.grad(), db));

  kernels::linear(x, w.weight, b).square().sum().backward();
  ASSERT_TRUE(w.is_in_buffer());
  EXPECT_EQ(w.events, 2);
  EXPECT_TRUE(at::allclose(w.buffer, 2 * expected));

  w.weight.mutable_grad().reset();  // zero_grad(): the next one is written again
  kernels::linear(x, w.weight).square().sum().backward();
  EXPECT_TRUE(w.is_in_buffer());
  EXPECT_TRUE(at::allclose(w.buffer, gradient(at::linear(x, w.weight).square().sum(), w.weight)));
}

TEST(BufferedLinear, AWeightUsedTwiceIsReadyOnce) {
  Buffered w({5, 5});
  const at::Tensor x = at::randn({4, 5});
  const at::Tensor expected = gradient(at::linear(at::linear(x, w.weight).tanh(), w.weight).square().sum(), w.weight);
  kernels::linear(kernels::linear(x, w.weight).tanh(), w.weight).square().sum().backward();
  EXPECT_TRUE(w.is_in_buffer());
  EXPECT_EQ(w.events, 1);
  EXPECT_TRUE(at::allclose(w.buffer, expected));
}

// One use by a Phalanx layer, one by an operator of autograd, in either order.
TEST(BufferedLinear, MixesWithWhatAutogradBrings) {
  for (const bool ours_first : {true, false}) {
    Buffered w({5, 5});
    const at::Tensor x = at::randn({4, 5});
    const auto run = [&](bool ours) { return ours ? kernels::linear(x, w.weight) : at::linear(x, w.weight).tanh(); };
    const at::Tensor expected =
        gradient((at::linear(x, w.weight) + 2 * at::linear(x, w.weight).tanh()).square().sum(), w.weight);
    const at::Tensor a = run(ours_first), b = run(!ours_first);
    (ours_first ? a + 2 * b : 2 * a + b).square().sum().backward();
    EXPECT_EQ(w.events, 1);
    EXPECT_TRUE(at::allclose(w.weight.grad(), expected));
  }
}

TEST(BufferedLinear, WhoAsksAutogradForTheGradientGetsIt) {
  Buffered w({3, 5});
  const at::Tensor x = parameter({4, 5});
  const at::Tensor expected = gradient(at::linear(x, w.weight).square().sum(), w.weight);
  EXPECT_TRUE(at::equal(gradient(kernels::linear(x, w.weight).square().sum(), w.weight), expected));
  EXPECT_FALSE(w.weight.grad().defined());
  EXPECT_EQ(w.events, 0);

  torch::autograd::backward({kernels::linear(x, w.weight).square().sum()}, {}, {}, false, {w.weight});
  EXPECT_TRUE(at::equal(w.weight.grad(), expected));
  EXPECT_FALSE(x.grad().defined());
  EXPECT_EQ(w.events, 1);
}

TEST(BufferedLinear, GradientsOfGradients) {
  Buffered w({3, 5});
  const at::Tensor x = parameter({4, 5});
  const auto penalty = [&](const at::Tensor& y) {
    const auto first = torch::autograd::grad({y.pow(3).sum()}, {x, w.weight}, {}, true, /*create_graph=*/true);
    return gradient(first[0].square().sum() + first[1].square().sum(), w.weight);
  };
  EXPECT_TRUE(at::allclose(penalty(kernels::linear(x, w.weight)), penalty(at::linear(x, w.weight)), 1e-4));
  EXPECT_EQ(w.events, 0);
}

TEST(BufferedLinear, HooksOfTheWeightSeeTheGradient) {
  Buffered w({3, 5});
  const at::Tensor x = at::randn({4, 5});
  const at::Tensor expected = gradient(at::linear(x, w.weight).square().sum(), w.weight);
  w.weight.register_hook([](const at::Tensor& grad) { return 2 * grad; });
  kernels::linear(x, w.weight).square().sum().backward();
  EXPECT_TRUE(at::equal(w.weight.grad(), 2 * expected));
  EXPECT_EQ(w.events, 1);
}

TEST(BufferedLinear, AGradientThatSomebodyPutThereIsAddedTo) {
  Buffered w({3, 5});
  const at::Tensor x = at::randn({4, 5});
  const at::Tensor expected = gradient(at::linear(x, w.weight).square().sum(), w.weight);
  w.weight.mutable_grad() = at::full_like(w.weight, 7).set_requires_grad(false);
  kernels::linear(x, w.weight).square().sum().backward();
  EXPECT_FALSE(w.is_in_buffer());
  EXPECT_TRUE(at::allclose(w.weight.grad(), expected + 7));
  EXPECT_EQ(w.events, 1);
}

TEST(BufferedFeedForward, AllThreeWeights) {
  constexpr std::int64_t kRows = 1100;  // three chunks: the first writes, the others add
  Buffered w1({6, 4}), w2({4, 6}), w3({6, 4});
  const at::Tensor x = at::randn({kRows, 4});
  const auto loss = [&] { return kernels::swiglu_feed_forward(x, w1.weight, w2.weight, w3.weight).square().mean(); };
  const auto expected = torch::autograd::grad({loss()}, {w1.weight, w2.weight, w3.weight});
  for (int pass = 1; pass <= 2; ++pass) {
    loss().backward();
    for (const auto& [w, gradient] :
         {std::tie(w1, expected[0]), std::tie(w2, expected[1]), std::tie(w3, expected[2])}) {
      EXPECT_TRUE(w.is_in_buffer());
      EXPECT_EQ(w.events, pass);
      EXPECT_TRUE(at::allclose(w.buffer, pass * gradient, 1e-4, 1e-6));
    }
  }
}

TEST(GradBuffer, IsBorrowedByOneAtATimeAndReclaimed) {
  const at::Tensor w = parameter({2});
  EXPECT_EQ(borrow_grad_buffer(w), nullptr);
  reclaim_grad_buffer(w);  // nothing to take back
  const auto subscription = on_grad_ready(w, [](const at::Tensor&) {});
  EXPECT_EQ(borrow_grad_buffer(w), nullptr);
  const at::Tensor buffer = at::zeros({2});
  set_grad_buffer(w, buffer);
  auto borrowed = borrow_grad_buffer(w);
  ASSERT_NE(borrowed, nullptr);
  EXPECT_TRUE(borrowed->is_same(buffer));
  EXPECT_EQ(borrow_grad_buffer(w), nullptr);
  borrowed->fill_(5);
  reclaim_grad_buffer(w);
  buffer.fill_(6);
  EXPECT_EQ((*borrowed)[0].item<float>(), 5);
  EXPECT_NE(borrow_grad_buffer(w), nullptr);  // and returned at once
  w.mutable_grad() = buffer;
  EXPECT_EQ(borrow_grad_buffer(w), nullptr);
}

TEST(GradBuffer, IsRefusedWhereItCannotServe) {
  const at::Tensor w = parameter({3, 5});
  set_grad_buffer(w, at::Tensor());                            // nothing to take back
  EXPECT_THROW(set_grad_buffer(w, at::empty_like(w)), Error);  // no listener
  EXPECT_FALSE(grad_buffer(w).defined());
  const auto subscription = on_grad_ready(w, [](const at::Tensor&) {});
  EXPECT_THROW(set_grad_buffer(w, at::randn({5, 3})), Error);
  EXPECT_THROW(set_grad_buffer(w, at::randn({3, 5}, at::kDouble)), Error);
  set_grad_buffer(w, at::randn({3, 5}));
  EXPECT_TRUE(grad_buffer(w).defined());
}

}  // namespace
}  // namespace phalanx
