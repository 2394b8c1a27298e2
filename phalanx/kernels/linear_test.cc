// Weight gradients that go straight into an offered buffer: the same numbers as autograd's own way, and autograd's own
// way wherever it must see them.
#include "phalanx/kernels/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/kernels/swiglu_feed_forward.h"
#include "phalanx/tensor/grad_ready.h"

namespace phalanx {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

at::Tensor parameter(std::vector<std::int64_t> shape) { return at::randn(shape, at::kFloat).set_requires_grad(true); }

// A weight with a buffer, and the count of its events. What lies in the buffer before must not matter: NaN.
struct Buffered {
  explicit Buffered(std::vector<std::int64_t> shape) : Buffered(at::randn(shape, at::kFloat)) {}
  explicit Buffered(const at::Tensor& value) : weight(value.detach().clone().set_requires_grad(true)) {
    buffer = at::full_like(weight, kNan).set_requires_grad(false);
    subscription = on_grad_ready(weight, [this](const at::Tensor&) { ++events; });
    set_grad_buffer(weight, buffer);
  }
  bool is_in_buffer() const { return weight.grad().defined() && weight.grad().is_same(buffer); }

  at::Tensor weight, buffer;
  int events = 0;
  GradReadySubscription subscription;
};

at::Tensor gradient(const at::Tensor& loss, const at::Tensor& of) {
  return torch::autograd::grad({loss}, {of}, {}, /*retain_graph=*/true)[0];
}

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

// One use by our layer, one by an operator of autograd, in either order.
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

// The head of a language model: three chunks of tokens, or logits as a whole where the dtype is not the kernels'.
struct Head {
  explicit Head(at::ScalarType dtype = at::kFloat) : x(at::randn({kRows, 4}, dtype)) {}
  at::Tensor loss(const at::Tensor& weight, double factor = 1.0) const {
    const at::Tensor value = kernels::linear_cross_entropy(x, weight, labels);
    return factor == 1.0 ? value : value * factor;
  }
  static constexpr std::int64_t kRows = 1100, kVocab = 7;
  at::Tensor x, labels = at::randint(kVocab, {kRows}, at::TensorOptions(at::kLong));
};

TEST(BufferedCrossEntropy, HasTheBitsOfAutogradsWay) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const double factor : {1.0, 0.3}) {
      Buffered w(at::randn({Head::kVocab, 4}, dtype));
      const at::Tensor plain = w.weight.detach().clone().set_requires_grad(true);
      for (int step = 0; step < 2; ++step) {
        for (int pass = 1; pass <= 3; ++pass) {  // of an accumulation
          const Head head(dtype);
          head.loss(plain, factor).backward();
          head.loss(w.weight, factor).backward();
          EXPECT_TRUE(w.is_in_buffer());
          if (dtype == at::kFloat || pass == 1) {
            EXPECT_TRUE(at::equal(w.buffer, plain.grad())) << "pass " << pass;
          } else {  // kernels::linear() adds within the matrix product
            EXPECT_TRUE(at::allclose(w.buffer, plain.grad())) << "pass " << pass;
          }
          EXPECT_EQ(w.events, step * 3 + pass);
        }
        w.weight.mutable_grad().reset();
        plain.mutable_grad().reset();
      }
    }
  }
}

TEST(BufferedCrossEntropy, TheGradientIsMadeInTheBuffer) {
  Buffered w({Head::kVocab, 4});
  const Head head;
  const at::Tensor expected = gradient(head.loss(w.weight), w.weight);
  w.buffer.fill_(kNan);
  const at::Tensor loss = head.loss(w.weight);
  EXPECT_FALSE(w.weight.grad().defined());
  EXPECT_TRUE(at::equal(w.buffer, expected));
  EXPECT_EQ(w.events, 0);
}

// One buffer, but any number of losses whose backward pass may come now, later or never.
TEST(BufferedCrossEntropy, ForwardAndBackwardPassesMayComeInAnyOrder) {
  Buffered w({Head::kVocab, 4});
  const Head a, b;
  const at::Tensor of_a = gradient(a.loss(w.weight), w.weight), of_b = gradient(b.loss(w.weight), w.weight);
  const auto expect = [&](const at::Tensor& expected, const char* what) {
    EXPECT_TRUE(w.is_in_buffer()) << what;
    EXPECT_TRUE(at::allclose(w.buffer, expected)) << what;
    EXPECT_EQ(std::exchange(w.events, 0), 1) << what;
    w.weight.mutable_grad().reset();
  };
  (a.loss(w.weight) + b.loss(w.weight)).backward();
  expect(of_a + of_b, "one pass through both");

  for (const bool first_is_first : {true, false}) {
    at::Tensor one = a.loss(w.weight), other = b.loss(w.weight);
    if (!first_is_first) std::swap(one, other);
    one.backward();
    w.events = 0;
    other.backward();
    expect(of_a + of_b, "one after the other");

    one = a.loss(w.weight), other = b.loss(w.weight);
    if (!first_is_first) std::swap(one, other);
    one.backward();
    expect(first_is_first ? of_a : of_b, "zero_grad() between two backward passes");
    other.backward();
    expect(first_is_first ? of_b : of_a, "after zero_grad()");
  }

  a.loss(w.weight);
  b.loss(w.weight).backward();
  expect(of_b, "a loss that was thrown away");

  a.loss(w.weight).backward();
  w.events = 0;
  const at::Tensor made_before = b.loss(w.weight);
  w.weight.mutable_grad().reset();
  made_before.backward();
  expect(of_b, "zero_grad() between forward and backward");

  const at::Tensor waiting = a.loss(w.weight);
  kernels::linear(b.x, w.weight).sum().backward();
  w.weight.mutable_grad().reset();
  w.events = 0;
  waiting.backward();
  expect(of_a, "another layer in between");

  const at::Tensor old = a.loss(w.weight);
  const at::Tensor old_buffer = std::exchange(w.buffer, at::full_like(w.buffer, kNan));
  set_grad_buffer(w.weight, w.buffer);
  old_buffer.fill_(kNan);
  b.loss(w.weight).backward();
  w.events = 0;
  old.backward();
  expect(of_a + of_b, "a new buffer");
}

TEST(BufferedCrossEntropy, AWeightThatAnotherLayerSharesIsReadyOnce) {
  Buffered w({Head::kVocab, 4});
  const at::Tensor plain = w.weight.detach().clone().set_requires_grad(true);
  const Head head;
  const auto loss = [&](const at::Tensor& weight) {  // the other contribution comes after the loss's
    const at::Tensor x = kernels::linear(at::full({Head::kRows, 4}, 0.3), weight).narrow(1, 0, 4) + head.x;
    return kernels::linear_cross_entropy(x, weight, head.labels);
  };
  loss(plain).backward();
  loss(w.weight).backward();
  EXPECT_TRUE(w.is_in_buffer());
  EXPECT_TRUE(at::allclose(w.buffer, plain.grad()));
  EXPECT_EQ(w.events, 1);
  for (const auto& weight : {plain, w.weight}) loss(weight).backward();
  EXPECT_TRUE(at::allclose(w.buffer, plain.grad()));
  EXPECT_EQ(w.events, 2);
}

TEST(BufferedCrossEntropy, AutogradsOwnWayWhereItMustSeeTheGradient) {
  Buffered w({Head::kVocab, 4});
  const Head head;
  const at::Tensor plain = w.weight.detach().clone().set_requires_grad(true);
  const at::Tensor expected = gradient(head.loss(plain, 0.3), plain);

  const at::Tensor asked = gradient(head.loss(w.weight, 0.3), w.weight);
  w.buffer.fill_(kNan);  // what the caller has is his own
  EXPECT_TRUE(at::equal(asked, expected));
  EXPECT_FALSE(w.weight.grad().defined());
  EXPECT_EQ(w.events, 0);

  torch::autograd::backward({head.loss(w.weight, 0.3)}, {}, {}, false, {w.weight});
  EXPECT_TRUE(at::equal(w.weight.grad(), expected));
  EXPECT_EQ(w.events, 1);

  const at::Tensor loss = head.loss(w.weight, 0.3);
  w.weight.mutable_grad() = at::full_like(w.weight, 7).set_requires_grad(false);  // somebody else's
  loss.backward();
  EXPECT_FALSE(w.is_in_buffer());
  EXPECT_TRUE(at::equal(w.weight.grad(), expected + 7));

  w.weight.mutable_grad().reset();
  w.weight.register_hook([](const at::Tensor& grad) { return grad * 2; });
  head.loss(w.weight, 0.3).backward();
  EXPECT_TRUE(at::equal(w.weight.grad(), expected * 2));
  EXPECT_EQ(w.events, 3);
}

TEST(BufferedCrossEntropy, AFrozenWeightGetsNothing) {
  Buffered w({Head::kVocab, 4});
  Head head;
  head.x.requires_grad_();
  head.loss(w.weight).backward();
  const at::Tensor expected = head.x.grad();
  head.x.mutable_grad().reset();
  w.weight.mutable_grad().reset();
  w.buffer.fill_(kNan);
  w.weight.set_requires_grad(false);
  head.loss(w.weight).backward();
  EXPECT_TRUE(at::equal(head.x.grad(), expected));
  EXPECT_FALSE(w.weight.grad().defined());
  EXPECT_TRUE(at::isnan(w.buffer).all().item<bool>());
  EXPECT_EQ(w.events, 1);
}

TEST(GradBuffer, IsLentToOneAtATimeAndTakenBack) {
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
  EXPECT_NE(borrow_grad_buffer(w), nullptr);  // and given back at once
  w.mutable_grad() = buffer;
  EXPECT_EQ(borrow_grad_buffer(w), nullptr);
}

TEST(GradBuffer, IsRefusedWhereItCannotServe) {
  const at::Tensor w = parameter({3, 5});
  set_grad_buffer(w, at::Tensor());                            // nothing to take back
  EXPECT_THROW(set_grad_buffer(w, at::empty_like(w)), Error);  // nobody listens
  EXPECT_FALSE(grad_buffer(w).defined());
  const auto subscription = on_grad_ready(w, [](const at::Tensor&) {});
  EXPECT_THROW(set_grad_buffer(w, at::randn({5, 3})), Error);
  EXPECT_THROW(set_grad_buffer(w, at::randn({3, 5}, at::kDouble)), Error);
  set_grad_buffer(w, at::randn({3, 5}));
  EXPECT_TRUE(grad_buffer(w).defined());
}

}  // namespace
}  // namespace phalanx
