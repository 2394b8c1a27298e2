// Experts as grouped products on a device: beside a product for each expert, in each form of a pass; and the host waits
// for nothing.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <string>
#include <vector>

#include "phalanx/kernels/autocast.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/mixture_of_experts.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/testing/sim_device/torch/testing/sim_test.h"

namespace phalanx::grouped_experts_test {
namespace {

struct ExpertsCase {
  std::string name;
  bool autocast = false;   // with float32 weights
  double capacity = 0;     // factor; 0: none
  bool one_sided = false;  // all tokens go to experts 0 and 2: the others have none
  bool recompute = false;
  bool shared = false;
};

class GroupedExperts : public SimTest, public ::testing::WithParamInterface<ExpertsCase> {
 protected:
  struct Outcome {
    at::Tensor y, dx;
    std::vector<at::Tensor> gradients;
    std::uint64_t waits = 0, products = 0;
  };

  static std::shared_ptr<nn::MixtureOfExperts> mixture(c10::Device device) {
    const ExpertsCase& how = GetParam();
    auto made = std::make_shared<nn::MixtureOfExperts>(
        nn::MixtureOptions{
            .dim = 32, .hidden = 48, .experts = 5, .experts_per_token = 2, .shared_hidden = how.shared ? 16 : 0},
        nn::TensorOptionsOfModule{.dtype = how.autocast ? at::kFloat : at::kBFloat16, .device = device});
    nn::initialise(*made, 3);
    if (how.capacity > 0) made->set_capacity({.factor = how.capacity});
    if (how.one_sided) {
      made->set_choose([](const nn::RouterChoice& choice) {
        at::Tensor chosen = at::zeros_like(choice.experts);
        chosen.select(1, 1).fill_(2);
        return chosen;
      });
    }
    if (how.recompute) checkpoint_activations(*made);
    return made;
  }

  /// Two passes, whose gradients add up.
  Outcome outcome(nn::MixtureOfExperts& net) {
    at::manual_seed(4);
    const at::ScalarType type = GetParam().autocast ? at::kFloat : at::kBFloat16;
    const at::Tensor x = at::randn({2, 24, 32}).to(device, type).requires_grad_();
    const at::Tensor dy = at::randn({2, 24, 32}).to(device, type);
    sim.runtime.synchronize_device(0, "before it is counted");
    sim.runtime.host_waits().clear();
    sim.runtime.clear_launches();
    Outcome result;
    for (int pass = 0; pass < 2; ++pass) {
      const kernels::AutocastScope scope(device.type(), {GetParam().autocast, at::kBFloat16});
      result.y = nn::call(net, x);
      torch::autograd::backward({result.y}, {dy});
    }
    result.waits = waits();
    for (const auto& [name, count] : sim.runtime.launches_by_kernel()) {
      if (std::string(name).find("mm") != std::string::npos) result.products += count;
    }
    result.y = result.y.detach().cpu();
    result.dx = x.grad().cpu();
    for (const auto& [name, parameter, shard] : nn::named_parameters(net)) {
      result.gradients.push_back(parameter.grad().cpu());
    }
    return result;
  }

  static void expect_near(const at::Tensor& found, const at::Tensor& expected) {
    // Both round to bfloat16, whose spacing is 2^-8 of a number, at other places.
    EXPECT_LE((found.to(at::kDouble) - expected.to(at::kDouble)).norm().item<double>(),
              0.01 * expected.to(at::kDouble).norm().item<double>() + 1e-12);
  }
};

TEST_P(GroupedExperts, AreThoseOfAProductForEachExpert) {
  const auto grouped = mixture(device), separate = mixture(device);
  const auto apart = [](const std::shared_ptr<nn::FeedForward>& net) {
    for (const auto& layer : {net->w1, net->w2, net->w3}) layer->weight.set_data(layer->weight.detach().clone());
  };
  for (const auto& [number, net] : separate->experts->nets()) apart(net);
  const Outcome found = outcome(*grouped), expected = outcome(*separate);
  expect_near(found.y, expected.y);
  expect_near(found.dx, expected.dx);
  ASSERT_EQ(found.gradients.size(), expected.gradients.size());
  for (std::size_t i = 0; i < found.gradients.size(); ++i) {
    SCOPED_TRACE(i);
    expect_near(found.gradients[i], expected.gradients[i]);
  }
  EXPECT_EQ(found.waits, 0U);
  EXPECT_GT(expected.waits, 0U);
  EXPECT_LT(found.products, expected.products / 2);
}

INSTANTIATE_TEST_SUITE_P(Forms, GroupedExperts,
                         ::testing::Values(ExpertsCase{.name = "bfloat16"},
                                           ExpertsCase{.name = "autocast", .autocast = true},
                                           ExpertsCase{.name = "capacity", .capacity = 0.5},
                                           ExpertsCase{.name = "capacity_autocast", .autocast = true, .capacity = 0.5},
                                           ExpertsCase{.name = "experts_without_tokens", .one_sided = true},
                                           ExpertsCase{.name = "recomputed", .recompute = true},
                                           ExpertsCase{.name = "shared_expert", .shared = true}),
                         [](const auto& info) { return info.param.name; });

class WhatIsGrouped : public SimTest {
 protected:
  bool is_grouped(std::int64_t dim, std::int64_t hidden, const nn::FeedForwardOptions& net = {},
                  at::ScalarType type = at::kBFloat16) const {
    nn::MixtureOfExperts mixture({.dim = dim, .hidden = hidden, .experts = 3, .experts_per_token = 1, .net = net},
                                 {.dtype = type, .device = device});
    nn::initialise(mixture, 1);
    return mixture.experts->can_be_grouped(at::randn({6, dim}).to(device, type));
  }
};

TEST_F(WhatIsGrouped, DependsOnTypesSizesAndLayers) {
  EXPECT_TRUE(is_grouped(16, 24));
  EXPECT_FALSE(is_grouped(16, 24, {}, at::kFloat));
  EXPECT_FALSE(is_grouped(16, 20)) << "rows of w2 are not multiples of 16 bytes";
  EXPECT_FALSE(is_grouped(16, 24, {.bias = true}));
  EXPECT_FALSE(is_grouped(16, 24, {.activation = GatedActivation::gelu_tanh}));
}

TEST_F(WhatIsGrouped, AHookOnAnExpertIsCalled) {
  nn::MixtureOfExperts mixture({.dim = 16, .hidden = 24, .experts = 3, .experts_per_token = 1},
                               {.dtype = at::kBFloat16, .device = device});
  nn::initialise(mixture, 1);
  const at::Tensor x = at::randn({6, 16}).to(device, at::kBFloat16);
  EXPECT_TRUE(mixture.experts->can_be_grouped(x));
  int calls = 0;
  mixture.experts->nets().at(1)->add_pre_forward_hook([&](nn::Module&) { ++calls; });
  EXPECT_FALSE(mixture.experts->can_be_grouped(x));
  nn::call(mixture, x.unsqueeze(0));
  EXPECT_EQ(calls, 1);
  mixture.experts->nets().at(2)->w2->weight.set_requires_grad(false);
  EXPECT_FALSE(mixture.experts->can_be_grouped(x));
}

TEST_F(WhatIsGrouped, InferenceHasTheSameValues) {
  nn::MixtureOfExperts mixture({.dim = 16, .hidden = 24, .experts = 3, .experts_per_token = 2},
                               {.dtype = at::kBFloat16, .device = device});
  nn::initialise(mixture, 1);
  const at::Tensor x = at::randn({2, 6, 16}).to(device, at::kBFloat16);
  const at::Tensor trained = nn::call(mixture, x).detach().cpu();
  const c10::InferenceMode inference;
  EXPECT_TRUE(at::equal(nn::call(mixture, x).cpu(), trained));
}

}  // namespace
}  // namespace phalanx::grouped_experts_test
