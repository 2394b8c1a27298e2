// The gradients of the two large matrices of a language model, embedding and output layer, which go directly into an
// offered buffer: autograd's bits, in any order of passes, and autograd's own way wherever autograd must see them.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <utility>

#include "phalanx/kernels/embedding.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/kernels/testing/grad_buffer_test_support.h"

namespace phalanx {
namespace {

using grad_buffer_testing::Buffered;
using grad_buffer_testing::gradient;
using grad_buffer_testing::kNan;
using grad_buffer_testing::parameter;

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
  w.buffer.fill_(kNan);  // the caller's tensor is not touched
  EXPECT_TRUE(at::equal(asked, expected));
  EXPECT_FALSE(w.weight.grad().defined());
  EXPECT_EQ(w.events, 0);

  torch::autograd::backward({head.loss(w.weight, 0.3)}, {}, {}, false, {w.weight});
  EXPECT_TRUE(at::equal(w.weight.grad(), expected));
  EXPECT_EQ(w.events, 1);

  const at::Tensor loss = head.loss(w.weight, 0.3);
  w.weight.mutable_grad() = at::full_like(w.weight, 7).set_requires_grad(false);  // other code's gradient
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

// Ids of shape [4, n]: every second is the padding id 0, the others come from the lower half of the rows, mostly
// repeated.
at::Tensor ids_with_padding(std::int64_t count, std::int64_t n, at::ScalarType dtype = at::kLong) {
  const at::TensorOptions integers(at::kLong);
  return (at::randint(count / 2, {4, n}, integers) * at::randint(2, {4, n}, integers)).to(dtype);
}

// The gradient differs at every position, even if the id is the same.
at::Tensor embedding_loss(const at::Tensor& rows) {
  const at::Tensor factors = at::arange(rows.numel(), at::kFloat).mul(0.37).cos().to(rows.scalar_type());
  return (rows.sin() * factors.view(rows.sizes())).pow(3).sum();
}

TEST(BufferedEmbedding, HasTheBitsOfAutogradsWay) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const auto& [count, dim] :
         {std::pair{6, 1}, std::pair{40, 7}, std::pair{200, 512}}) {  // one thread and several
      Buffered w(at::randn({count, dim}, dtype));
      const at::Tensor plain = w.weight.detach().clone().set_requires_grad(true);
      for (int step = 0; step < 2; ++step) {
        for (int pass = 1; pass <= 3; ++pass) {  // of an accumulation
          const at::Tensor ids = ids_with_padding(count, 100, pass == 2 ? at::kInt : at::kLong);
          // In 16 bits ATen would sum gradients in them.
          const bool is_narrow = plain.itemsize() == 2;
          embedding_loss(is_narrow ? at::embedding(plain.to(at::kFloat), ids).to(dtype) : at::embedding(plain, ids))
              .backward();
          const at::Tensor rows = kernels::embedding(w.weight, ids);
          EXPECT_TRUE(at::equal(rows, at::embedding(plain, ids)));
          embedding_loss(rows).backward();
          EXPECT_TRUE(w.is_in_buffer());
          EXPECT_TRUE(at::equal(w.buffer, plain.grad())) << dtype << ", dim " << dim << ", pass " << pass;
          EXPECT_EQ(w.events, step * 3 + pass);
        }
        w.weight.mutable_grad().reset();
        plain.mutable_grad().reset();
      }
    }
  }
}

TEST(BufferedEmbedding, NoIdsGiveZerosAndAnIdOutOfRangeIsAnError) {
  Buffered w({6, 3});
  kernels::embedding(w.weight, at::empty({0}, at::kLong)).sum().backward();
  EXPECT_TRUE(w.is_in_buffer());
  EXPECT_TRUE(at::equal(w.buffer, at::zeros({6, 3})));
  for (const std::int64_t bad : {-1, 6}) {
    EXPECT_THROW(kernels::embedding(w.weight, at::full({2}, bad, at::TensorOptions(at::kLong))), c10::IndexError);
  }
}

TEST(BufferedEmbedding, ABufferOfOtherStridesIsFilledByATen) {
  Buffered w({6, 3});
  w.buffer = at::full({3, 6}, kNan).t();
  set_grad_buffer(w.weight, w.buffer);
  const at::Tensor ids = ids_with_padding(6, 10);
  const at::Tensor expected = gradient(embedding_loss(at::embedding(w.weight, ids)), w.weight);
  for (int pass = 1; pass <= 2; ++pass) {
    embedding_loss(kernels::embedding(w.weight, ids)).backward();
    EXPECT_TRUE(w.is_in_buffer());
    EXPECT_TRUE(at::equal(w.buffer, expected * pass));
  }
}

// One parameter for both ends of a model: the loss's part comes first, and the embedding adds to it.
TEST(BufferedEmbedding, TiedToTheOutputLayerTheWeightIsReadyOnce) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {  // the fused loss and the linear layer
    Buffered w(at::randn({30, 8}, dtype));
    const at::Tensor plain = w.weight.detach().clone().set_requires_grad(true);
    for (int pass = 1; pass <= 3; ++pass) {
      const at::Tensor ids = ids_with_padding(30, 200);
      for (const auto& weight : {plain, w.weight}) {
        kernels::linear_cross_entropy(kernels::embedding(weight, ids).tanh(), weight, ids.view({-1})).backward();
      }
      EXPECT_TRUE(w.is_in_buffer());
      EXPECT_EQ(w.events, pass);
      if (pass == 1) {
        EXPECT_TRUE(at::equal(w.buffer, plain.grad()));  // the sum of two parts does not depend on their order
      } else {
        EXPECT_TRUE(at::allclose(w.buffer, plain.grad()));
      }
    }
  }
}

TEST(BufferedEmbedding, AutogradsOwnWayWhereItMustSeeTheGradient) {
  Buffered w({6, 3});
  const at::Tensor ids = ids_with_padding(6, 10);
  const auto loss = [&] { return embedding_loss(kernels::embedding(w.weight, ids)); };
  const at::Tensor expected = gradient(embedding_loss(at::embedding(w.weight, ids)), w.weight);
  EXPECT_TRUE(at::equal(gradient(loss(), w.weight), expected));
  EXPECT_FALSE(w.weight.grad().defined());
  EXPECT_EQ(w.events, 0);

  const auto penalty = [&](const at::Tensor& rows) {
    const at::Tensor first = torch::autograd::grad({embedding_loss(rows)}, {w.weight}, {}, true, true)[0];
    return gradient(first.square().sum(), w.weight);
  };
  EXPECT_TRUE(at::equal(penalty(kernels::embedding(w.weight, ids)), penalty(at::embedding(w.weight, ids))));

  torch::autograd::backward({loss()}, {}, {}, false, {w.weight});
  EXPECT_TRUE(at::equal(w.weight.grad(), expected));
  w.weight.mutable_grad() = at::full_like(w.weight, 7).set_requires_grad(false);  // other code's gradient
  loss().backward();
  EXPECT_FALSE(w.is_in_buffer());
  EXPECT_TRUE(at::equal(w.weight.grad(), expected + 7));
  w.weight.mutable_grad().reset();
  w.weight.register_hook([](const at::Tensor& grad) { return grad * 2; });
  loss().backward();
  EXPECT_TRUE(at::equal(w.weight.grad(), expected * 2));
  EXPECT_EQ(w.events, 3);
}

TEST(BufferedEmbedding, AFrozenTableGetsNothing) {
  Buffered w({6, 3});
  w.weight.set_requires_grad(false);
  const at::Tensor x = parameter({3});
  (kernels::embedding(w.weight, ids_with_padding(6, 10)) * x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(w.weight.grad().defined());
  EXPECT_TRUE(at::isnan(w.buffer).all().item<bool>());
  EXPECT_EQ(w.events, 0);
}

}  // namespace
}  // namespace phalanx
