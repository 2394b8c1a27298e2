// Backward passes split into two halves, against whole ones; and Sequentials in parts.
#include "phalanx/parallel/pipeline/graph_split.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/parallel/pipeline/testing/pipeline_test_support.h"

namespace phalanx {
namespace {

using Network = std::function<at::Tensor(const at::Tensor& x, const std::vector<at::Tensor>& w)>;

// Both halves against backward(); `when_i`: whether parameters may have gradients after the first half.
void expect_split(const Network& network, bool input_needs_grad, bool first_half_does_all) {
  std::vector<at::Tensor> w;
  for (int i = 0; i < 3; ++i) w.push_back(at::randn({6, 6}).set_requires_grad(true));
  const at::Tensor x = at::randn({4, 6}).set_requires_grad(input_needs_grad), dy = at::randn({4, 6});
  network(x, w).backward(dy);
  std::vector<at::Tensor> expected;
  for (const auto& p : w) expected.push_back(std::exchange(p.mutable_grad(), at::Tensor()));
  const at::Tensor dx = std::exchange(x.mutable_grad(), at::Tensor());

  const at::Tensor y = network(x, w);
  GraphSplit split(y, x, w);
  const at::Tensor found = split.backward_input(dy);
  ASSERT_EQ(found.defined(), input_needs_grad);
  if (input_needs_grad) {
    EXPECT_TRUE(at::equal(found, dx));
  }
  for (const auto& p : w) EXPECT_EQ(p.grad().defined(), first_half_does_all);
  split.backward_weight();
  for (std::size_t i = 0; i < w.size(); ++i) EXPECT_TRUE(at::equal(w[i].grad(), expected[i])) << i;
  EXPECT_FALSE(x.grad().defined());
  EXPECT_THROW(split.backward_weight(), Error);
}

TEST(GraphSplit, IsTheWholeBackwardPass) {
  const Network chain = [](const at::Tensor& x, const std::vector<at::Tensor>& w) {
    return at::linear(at::relu(at::linear(at::relu(at::linear(x, w[0])), w[1])), w[2]);
  };
  const Network residual = [](const at::Tensor& x, const std::vector<at::Tensor>& w) {
    const at::Tensor h = x + at::linear(x, w[0]).tanh();
    return (h + at::linear(h, w[1])) * at::linear(at::relu(h), w[2].tanh());
  };
  for (const auto& network : {chain, residual}) {
    expect_split(network, true, false);
    expect_split(network, false, false);
  }
}

TEST(GraphSplit, AParameterUsedTwiceIsNotSplit) {
  const Network twice = [](const at::Tensor& x, const std::vector<at::Tensor>& w) {
    return at::linear(at::linear(at::linear(at::linear(x, w[0]), w[1]).tanh(), w[0]), w[2]);
  };
  expect_split(twice, true, true);
  expect_split(twice, false, false);
}

TEST(SplitSequential, PartsKeepTheirNames) {
  const auto net = pipeline_testing::torch_layers();
  const auto parts = split_sequential(net, {3, 13});
  EXPECT_EQ(parts[1]->named_parameters().keys().front(), "4.weight");
  const at::Tensor x = pipeline_testing::random_rows(2, "x");
  EXPECT_TRUE(at::equal(parts[1]->forward(parts[0]->forward(x)), torch::nn::Sequential(net)->forward(x)));
  EXPECT_THAT(error_text([&] {
                split_sequential(net, {3, 14});
              }),
              HasSubstr("stages of [3, 14] children from a Sequential of 16"));
  EXPECT_THROW(split_sequential(net, {0, 16}), Error);
  EXPECT_THROW(split_sequential(net, {}), Error);
}

}  // namespace
}  // namespace phalanx
