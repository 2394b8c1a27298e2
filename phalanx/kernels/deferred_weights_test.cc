// Weight gradients that are left in a queue: the same bits as without it, and not before the queue is flushed.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <memory>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/embedding.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/kernels/rms_norm.h"
#include "phalanx/kernels/swiglu_feed_forward.h"
#include "phalanx/kernels/testing/grad_buffer_test_support.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx {
namespace {

using grad_buffer_testing::Buffered;
using grad_buffer_testing::parameter;

constexpr std::int64_t kVocab = 11, kDim = 704, kHidden = 6, kRows = 700;  // two chunks of rows

// Every kernel that defers, a norm between them, and a matrix that is both the first and the last.
struct TiedModel {
  at::Tensor table = parameter({kVocab, kDim}), gain = parameter({kDim}), w = parameter({kDim, kDim}),
             b = parameter({kDim}), w1 = parameter({kHidden, kDim}), w2 = parameter({kDim, kHidden}),
             w3 = parameter({kHidden, kDim});
  std::vector<at::Tensor> parameters() const { return {table, gain, w, b, w1, w2, w3}; }
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& labels) const {
    at::Tensor x = kernels::rms_norm(kernels::embedding(table, ids), gain, 1e-5);
    x = x + kernels::linear(x, w, b) * 0.01;
    x = x + kernels::swiglu_feed_forward(x, w1, w2, w3) * 0.01;
    return kernels::linear_cross_entropy(x, table, labels) * 0.5;
  }
};

struct Batch {
  at::Tensor ids = at::randint(kVocab, {2, kRows / 2}, at::kLong), labels = at::randint(kVocab, {kRows}, at::kLong);
};

// Gradients of two micro-batches, added up: those of the weights all at once, or in the order I0 I1 W0 W1.
std::vector<at::Tensor> gradients(const TiedModel& model, const std::vector<Batch>& batches, bool deferred) {
  for (const auto& p : model.parameters()) p.mutable_grad().reset();
  const auto queue = std::make_shared<WeightGradientQueue>();
  queue->set_deferring(deferred);
  const int count = static_cast<int>(batches.size());
  for (int i = 0; i < count; ++i) {
    at::Tensor loss;
    {
      const WeightGradientQueue::Scope scope(queue, {.micro_batch = i});
      loss = model.loss(batches[static_cast<std::size_t>(i)].ids, batches[static_cast<std::size_t>(i)].labels);
    }
    loss.backward();
    EXPECT_EQ(queue->size({.micro_batch = i}), deferred ? 7U : 0U);
    EXPECT_EQ(model.w.grad().defined(), !deferred);
  }
  for (int i = 0; i < count; ++i) queue->flush({.micro_batch = i});
  EXPECT_TRUE(queue->is_empty());
  std::vector<at::Tensor> result;
  for (const auto& p : model.parameters()) result.push_back(p.grad().clone());
  return result;
}

TEST(DeferredWeights, HaveTheBitsOfThoseThatAreNot) {
  const TiedModel model;
  const std::vector<Batch> batches(2);
  const auto expected = gradients(model, batches, false), found = gradients(model, batches, true);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (i == 0) {  // the tied matrix: its two gradients of a micro-batch are added to the sum one by one
      EXPECT_LE((found[i] - expected[i]).norm().item<double>(), 1e-6 * expected[i].norm().item<double>());
    } else {
      EXPECT_TRUE(at::equal(found[i], expected[i])) << "parameter " << i;
    }
  }
  const auto once = gradients(model, {batches[0]}, false), later = gradients(model, {batches[0]}, true);
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(at::equal(later[i], once[i])) << "parameter " << i;
}

TEST(DeferredWeights, GoIntoTheOfferedBufferAndTellWhenTheLastIsIn) {
  // Small whole numbers, whose products and sums are exact: some processors round a fused multiply-add differently from
  // separate operations.
  Buffered w({3, 5}), b({3});
  const at::Tensor x = parameter({4, 5});
  {
    const at::NoGradGuard guard;
    for (const at::Tensor& t : {w.weight, b.weight, x}) t.random_(-4, 5);
  }
  const auto queue = std::make_shared<WeightGradientQueue>();
  const auto forward = [&](int micro_batch) {
    const WeightGradientQueue::Scope scope(queue, {.micro_batch = micro_batch});
    return kernels::linear(x, w.weight, b.weight).square().sum();
  };
  queue->set_deferring(false);
  forward(0).backward();
  ASSERT_TRUE(w.is_in_buffer());
  const at::Tensor dx = x.grad().clone(), dw = w.buffer.clone(), db = b.weight.grad().clone();
  EXPECT_EQ(w.events, 1);
  x.mutable_grad().reset();
  w.weight.mutable_grad().reset();
  b.weight.mutable_grad().reset();

  queue->set_deferring(true);
  forward(0).backward();
  EXPECT_TRUE(at::equal(x.grad(), dx));
  EXPECT_FALSE(w.weight.grad().defined());
  EXPECT_TRUE(is_gradient_expected(w.weight));
  forward(1).backward();
  queue->flush({.micro_batch = 1});
  EXPECT_EQ(w.events, 1);  // the event of micro-batch 0 is still to come
  queue->flush({.micro_batch = 0});
  EXPECT_EQ(w.events, 2);
  EXPECT_EQ(b.events, 2);
  EXPECT_FALSE(is_gradient_expected(w.weight));
  EXPECT_TRUE(w.is_in_buffer());
  EXPECT_TRUE(b.is_in_buffer());
  EXPECT_TRUE(at::equal(w.buffer, 2 * dw));
  EXPECT_TRUE(at::equal(b.buffer, 2 * db));
}

// A gradient that autograd brings for the same weight in the same pass fires no separate event.
TEST(DeferredWeights, AreOneEventWithWhatAutogradBrings) {
  Buffered w({5, 5});
  const at::Tensor x = at::randn({4, 5});
  const auto loss = [&] { return (kernels::linear(x, w.weight) + 2 * at::linear(x, w.weight).tanh()).square().sum(); };
  const at::Tensor expected = grad_buffer_testing::gradient(loss(), w.weight);
  const auto queue = std::make_shared<WeightGradientQueue>();
  at::Tensor y;
  {
    const WeightGradientQueue::Scope scope(queue, {});
    y = loss();
  }
  y.backward();
  EXPECT_EQ(w.events, 0);
  queue->flush({});
  EXPECT_EQ(w.events, 1);
  EXPECT_LE((w.weight.grad() - expected).abs().max().item<double>(), 1e-5);
}

TEST(DeferredWeights, AHeldEventIsTheHoldersToFire) {
  Buffered w({3, 5});
  const auto queue = std::make_shared<WeightGradientQueue>();
  const auto pass = [&] {
    at::Tensor y;
    {
      const WeightGradientQueue::Scope scope(queue, {});
      y = kernels::linear(at::randn({4, 5}), w.weight).sum();
    }
    y.backward();
    queue->flush({});
  };
  {
    const GradReadyHold hold({w.weight});
    pass();
    at::linear(at::randn({4, 5}), w.weight).sum().backward();  // autograd's
    EXPECT_EQ(w.events, 0);
    fire_grad_ready(w.weight);
    EXPECT_EQ(w.events, 1);
  }
  pass();
  EXPECT_EQ(w.events, 2);
}

TEST(DeferredWeights, WhoAsksAutogradForTheGradientGetsIt) {
  const at::Tensor w = parameter({3, 5}), x = parameter({4, 5});
  const auto queue = std::make_shared<WeightGradientQueue>();
  const WeightGradientQueue::Scope scope(queue, {});
  const auto loss = [&] { return kernels::linear(x, w).square().sum(); };
  const at::Tensor expected = grad_buffer_testing::gradient(loss(), w);
  EXPECT_TRUE(queue->is_empty());
  torch::autograd::backward({loss()}, {}, {}, false, {w});
  EXPECT_TRUE(at::equal(w.grad(), expected));
  EXPECT_TRUE(queue->is_empty());
  w.mutable_grad().reset();
  w.register_hook([](const at::Tensor& grad) { return 2 * grad; });
  loss().backward();
  EXPECT_TRUE(at::equal(w.grad(), 2 * expected));
  EXPECT_TRUE(queue->is_empty());
}

TEST(DeferredWeights, DroppedOrFailedOnesAreNotWaitedFor) {
  Buffered w({3, 5}), other({3, 5});
  const auto queue = std::make_shared<WeightGradientQueue>();
  {
    const WeightGradientQueue::Scope scope(queue, {.stage = 1});
    kernels::linear(at::randn({4, 5}), w.weight).sum().backward();
  }
  queue->drop({.stage = 1});
  EXPECT_FALSE(is_gradient_expected(w.weight));
  EXPECT_FALSE(w.weight.grad().defined());
  queue->put({}, w.weight, [](const WeightGradient&) { throw Error("no"); });
  queue->put({}, other.weight, [](const WeightGradient&) {});
  EXPECT_THROW(queue->flush({}), Error);
  EXPECT_TRUE(queue->is_empty());
  EXPECT_FALSE(is_gradient_expected(w.weight));
  EXPECT_FALSE(is_gradient_expected(other.weight));
  EXPECT_EQ(w.events + other.events, 0);
}

// CPU time of this thread, which runs the backward pass: the machine may be busy.
double processor_ms() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

// Printed, not checked: I costs about half of B, and I + W as much as B.
TEST(DeferredWeights, TheHalvesOfABackwardPass) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 3; ++i) {
    weights.push_back(parameter({1024, 512}));
    weights.push_back(parameter({512, 1024}));
  }
  const auto queue = std::make_shared<WeightGradientQueue>();
  const at::Tensor x = parameter({256, 512});
  double b = 1e9, i = 1e9, w = 1e9;
  for (int round = 0; round < 12; ++round) {
    const bool split = round % 2 != 0;
    queue->set_deferring(split);
    at::Tensor y = x;
    {
      const WeightGradientQueue::Scope scope(queue, {});
      for (const auto& weight : weights) y = kernels::linear(y, weight).relu();
    }
    const at::Tensor dy = at::randn(y.sizes());
    const double begin = processor_ms();
    y.backward(dy);
    const double middle = processor_ms();
    queue->flush({});
    if (split) {
      i = std::min(i, middle - begin);
      w = std::min(w, processor_ms() - middle);
    } else if (round > 0) {
      b = std::min(b, middle - begin);
    }
  }
  at::set_num_threads(threads);
  fmt::print(
      "6 linear layers of 512 x 1024, 256 rows, processor time: B {:.2f} ms, I {:.2f} ms ({:.2f} B), I + W {:.2f} ms "
      "({:.2f} B)\n",
      b, i, i / b, i + w, (i + w) / b);
}

}  // namespace
}  // namespace phalanx
