#include "phalanx/tensor/grad_ready.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

TEST(GradReady, FiresOncePerBackwardAfterAllUsesAreAdded) {
  const auto w = at::full({2}, 3.0).requires_grad_();
  std::vector<float> seen;
  const auto subscription = on_grad_ready(w, [&](const at::Tensor& p) { seen.push_back(p.grad()[0].item<float>()); });
  (w.mul(w).sum().add(w.sum())).backward();  // 2w + 1, from three uses
  w.sum().backward();                        // accumulates
  EXPECT_THAT(seen, ElementsAre(7.0F, 8.0F));
}

TEST(GradReady, ServesSeveralListenersInOrderUntilTheyUnsubscribe) {
  const auto w = at::ones({1}).requires_grad_();
  std::vector<int> seen;
  std::optional<GradReadySubscription> first = on_grad_ready(w, [&](const at::Tensor&) { seen.push_back(1); });
  const auto second = on_grad_ready(w, [&](const at::Tensor&) { seen.push_back(2); });
  w.sum().backward();
  first.reset();
  w.sum().backward();
  EXPECT_THAT(seen, ElementsAre(1, 2, 2));
}

TEST(GradReady, AListenerMayEndItsOwnSubscriptionAndReplaceTheGradient) {
  const auto w = at::ones({1}).requires_grad_();
  int calls = 0;
  GradReadySubscription subscription;
  subscription = on_grad_ready(w, [&](const at::Tensor& p) {
    ++calls;
    p.mutable_grad() = at::full({1}, 42.0);
    subscription = {};
  });
  w.sum().backward();
  EXPECT_EQ(w.grad().item<float>(), 42.0F);
  w.sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(w.grad().item<float>(), 43.0F);
}

TEST(GradReady, CanBeFiredByHand) {
  const auto w = at::ones({1}).requires_grad_();
  fire_grad_ready(w);  // no listener: nothing happens
  int calls = 0;
  const auto subscription = on_grad_ready(w, [&](const at::Tensor& p) {
    EXPECT_TRUE(p.is_same(w));
    ++calls;
  });
  fire_grad_ready(w);
  EXPECT_EQ(calls, 1);
}

// w * x, but its backward function saves w's gradient for later.
struct DeferredProduct : torch::autograd::Function<DeferredProduct> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor& w) {
    return x.mul(w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

TEST(GradReady, AnUndefinedGradientIsNotOne) {
  const auto x = at::ones({1}).requires_grad_(), w = at::ones({1}).requires_grad_();
  int calls = 0;
  const auto subscription = on_grad_ready(w, [&](const at::Tensor&) { ++calls; });
  DeferredProduct::apply(x, w).backward();
  EXPECT_EQ(calls, 0);
  w.sum().backward();
  EXPECT_EQ(calls, 1);
  DeferredProduct::apply(x, w).backward();  // w.grad() already exists
  EXPECT_EQ(calls, 1);
  DeferredProduct::apply(x, w).add(w).sum().backward();
  EXPECT_EQ(calls, 2);
  torch::autograd::grad({w.sum()}, {w});
  DeferredProduct::apply(x, w).backward();
  EXPECT_EQ(calls, 2);
}

struct CountingHook final : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int& calls) : calls(calls) {}
  void operator()(const at::Tensor&) override { ++calls; }
  int& calls;
};

TEST(GradReady, KeepsAHookThatWasThereBefore) {
  const auto w = at::ones({1}).requires_grad_();
  int foreign = 0, ours = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<CountingHook>(foreign));
  const auto subscription = on_grad_ready(w, [&](const at::Tensor&) {
    EXPECT_EQ(foreign, 1);
    ++ours;
  });
  w.sum().backward();
  EXPECT_EQ(foreign, 1);
  EXPECT_EQ(ours, 1);
}

TEST(GradReady, LivesBesideOrdinaryTensorHooks) {
  const auto w = at::ones({1}).requires_grad_();
  int ours = 0, theirs = 0;
  w.register_hook([&](const at::Tensor&) { ++theirs; });
  const auto subscription = on_grad_ready(w, [&](const at::Tensor&) { ++ours; });
  w.register_hook([&](const at::Tensor&) { ++theirs; });
  w.sum().backward();
  EXPECT_EQ(ours, 1);
  EXPECT_EQ(theirs, 2);
}

TEST(GradReady, DoesNotFireForGradOrForFrozenParts) {
  const auto w = at::ones({1}).requires_grad_(), v = at::ones({1}).requires_grad_();
  int calls = 0;
  const auto of_w = on_grad_ready(w, [&](const at::Tensor&) { ++calls; });
  const auto of_v = on_grad_ready(v, [&](const at::Tensor&) { ++calls; });
  torch::autograd::grad({w.mul(v).sum()}, {w});
  EXPECT_EQ(calls, 0);
  w.mul(v.detach()).sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST(GradReady, WhatAListenerThrowsReachesTheCallerOfBackward) {
  const auto w = at::ones({1}).requires_grad_();
  const auto subscription = on_grad_ready(w, [](const at::Tensor&) { throw CommError("rank 3 is gone"); });
  try {
    w.sum().backward();
    FAIL() << "expected the listener's error";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(), "rank 3 is gone");
  }
}

TEST(GradReady, RefusesTensorsThatHaveNoGradient) {
  const auto w = at::ones({1}).requires_grad_();
  const auto ignore = [](const at::Tensor&) {};
  EXPECT_THROW((void)on_grad_ready(at::Tensor(), ignore), Error);
  EXPECT_THROW((void)on_grad_ready(at::ones({1}), ignore), Error);
  EXPECT_THROW((void)on_grad_ready(w.mul(2), ignore), Error);
}

}  // namespace
}  // namespace phalanx
