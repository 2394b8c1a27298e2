#include "phalanx/optim/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/optim/adadelta.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/lion.h"
#include "phalanx/optim/sgd.h"

namespace phalanx {
namespace {

const nlohmann::json& optimizer_golden() {
  static const nlohmann::json golden =
      nlohmann::json::parse(std::ifstream(std::string(PHALANX_OPTIM_TESTDATA) + "/optim_golden.json"));
  return golden;
}

at::Tensor golden_tensor(const nlohmann::json& values, const nlohmann::json& shape) {
  return at::tensor(values.get<std::vector<float>>()).view(shape.get<std::vector<std::int64_t>>());
}

std::vector<NamedTensor> golden_parameters() {
  std::vector<NamedTensor> parameters;
  for (const auto& [name, shape] : optimizer_golden().at("shapes").items()) {
    parameters.push_back({name, golden_tensor(optimizer_golden().at("start").at(name), shape).requires_grad_()});
  }
  return parameters;
}

void set_golden_gradients(const std::vector<NamedTensor>& parameters, std::size_t step) {
  for (const auto& [name, tensor, shard] : parameters) {
    tensor.mutable_grad() =
        golden_tensor(optimizer_golden().at("gradients").at(step).at(name), optimizer_golden().at("shapes").at(name));
  }
}

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<NamedTensor>)>;

void expect_same_as_torch(const std::string& run, const MakeOptimizer& make) {
  SCOPED_TRACE(run);
  auto parameters = golden_parameters();
  const auto optimizer = make(parameters);
  const auto rates = optimizer_golden().at(run).at("learning_rates").get<std::vector<double>>();
  for (std::size_t step = 0; step < rates.size(); ++step) {
    set_golden_gradients(parameters, step);
    optimizer->step(rates[step]);
  }
  for (const auto& [name, tensor, shard] : parameters) {
    const auto expected =
        golden_tensor(optimizer_golden().at(run).at("parameters").at(name), optimizer_golden().at("shapes").at(name));
    EXPECT_TRUE(at::allclose(tensor.detach(), expected, /*rtol=*/1e-6, /*atol=*/2e-7)) << name;
  }
}

template <class T, class Options>
MakeOptimizer maker(Options options) {
  return [options](std::vector<NamedTensor> parameters) { return std::make_unique<T>(std::move(parameters), options); };
}

TEST(Optimizer, AdamWFollowsTorch) {
  expect_same_as_torch("adamw", maker<AdamW>(AdamWOptions{}));
  expect_same_as_torch("adamw_no_decay",
                       maker<AdamW>(AdamWOptions{.beta1 = 0.8, .beta2 = 0.999, .eps = 1e-6, .weight_decay = 0}));
}

TEST(Optimizer, SgdFollowsTorch) {
  expect_same_as_torch("sgd", maker<Sgd>(SgdOptions{}));
  expect_same_as_torch("sgd_momentum", maker<Sgd>(SgdOptions{.momentum = 0.9, .weight_decay = 0.05}));
  expect_same_as_torch("sgd_nesterov", maker<Sgd>(SgdOptions{.momentum = 0.9, .nesterov = true}));
}

TEST(Optimizer, AdadeltaFollowsTorch) {
  expect_same_as_torch("adadelta", maker<Adadelta>(AdadeltaOptions{}));
  expect_same_as_torch("adadelta_decay",
                       maker<Adadelta>(AdadeltaOptions{.rho = 0.8, .eps = 1e-5, .weight_decay = 0.05}));
  for (const auto& wrong : {AdadeltaOptions{.rho = 1.0}, AdadeltaOptions{.eps = 0.0}}) {
    EXPECT_THROW(Adadelta(golden_parameters(), wrong), ConfigError);
  }
}

// torch has no Lion: the paper's program (algorithm 2) in float64 is what it must follow.
TEST(Optimizer, LionFollowsItsPaper) {
  const LionOptions options{.beta1 = 0.95, .beta2 = 0.98, .weight_decay = 0.5};
  for (const auto dtype : {at::kFloat, at::kDouble}) {  // our own kernel, libtorch's operators
    std::vector<NamedTensor> parameters = golden_parameters();
    std::vector<at::Tensor> p, m;
    for (NamedTensor& one : parameters) {
      one.tensor = one.tensor.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true).requires_grad_();
      p.push_back(one.tensor.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true));
      m.push_back(at::zeros_like(p.back()));
    }
    Lion optimizer(parameters, options);
    for (std::size_t step = 0; step < 6; ++step) {
      const double lr = 0.01 * static_cast<double>(step + 1);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto& golden = optimizer_golden();
        const at::Tensor g = golden_tensor(golden.at("gradients").at(step).at(parameters[i].name),
                                           golden.at("shapes").at(parameters[i].name));
        parameters[i].tensor.mutable_grad() = g.to(dtype);
        const at::Tensor exact = g.to(at::kDouble), update = m[i] * 0.95 + exact * 0.05;
        p[i].sub_((update.sign() + p[i] * 0.5) * lr);
        m[i].mul_(0.98).add_(exact * 0.02);
      }
      optimizer.step(lr);
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(at::allclose(parameters[i].tensor.detach().to(at::kDouble), p[i], 1e-6, 2e-7)) << parameters[i].name;
    }
  }
  for (const auto& wrong : {LionOptions{.beta1 = 1.0}, LionOptions{.beta2 = -0.1}}) {
    EXPECT_THROW(Lion(golden_parameters(), wrong), ConfigError);
  }
}

TEST(Optimizer, LionHidesNothingThatIsNotANumber) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor p = at::ones({3}, dtype).requires_grad_();
    p.mutable_grad() = at::tensor({0.0, NAN, 2.0}).to(dtype);
    Lion({{"p", p}}).step(0.25);
    EXPECT_EQ(p[0].item<double>(), 1);
    EXPECT_TRUE(std::isnan(p[1].item<double>()));
    EXPECT_EQ(p[2].item<double>(), 0.75);
  }
}

/// As in scripts/make_optim_golden.py.
std::vector<ParameterGroup> golden_groups() {
  return {{.params = {"w*t"}, .lr_factor = 4, .weight_decay = 0.3}, {.params = {"bias"}, .weight_decay = 0.0}};
}

TEST(Optimizer, GroupsFollowTorch) {
  expect_same_as_torch("adamw_groups", maker<AdamW>(AdamWOptions{.groups = golden_groups()}));
  expect_same_as_torch("sgd_groups",
                       maker<Sgd>(SgdOptions{.momentum = 0.9, .weight_decay = 0.1, .groups = golden_groups()}));
}

/// One optimizer with groups, beside an optimizer of its own for each parameter.
template <class T, class Options>
void expect_groups_are_optimizers(Options options) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {  // our own kernels, libtorch's, masters
    const auto make = [&] {
      std::vector<NamedTensor> parameters;
      for (const std::string name : {"norm", "output", "wq", "bias"}) {
        parameters.push_back({name, at::ones({5}, dtype).mul(0.5).requires_grad_()});
      }
      return parameters;
    };
    const auto together = make(), apart = make();
    options.no_decay = {"bias"};
    options.groups = {{.params = {"nor?"}, .lr_factor = 3}, {.params = {"w[qk]", "out*"}, .weight_decay = 0.25}};
    T optimizer(together, options);
    std::vector<std::unique_ptr<T>> single;
    for (const auto& parameter : apart) {
      Options own = options;
      own.no_decay.clear();
      own.groups.clear();
      if (parameter.name == "bias") own.weight_decay = 0;
      if (parameter.name == "wq" || parameter.name == "output") own.weight_decay = 0.25;
      single.push_back(std::make_unique<T>(std::vector<NamedTensor>{parameter}, own));
    }
    for (int step = 0; step < 3; ++step) {
      for (const auto* side : {&together, &apart}) {
        for (std::size_t i = 0; i < side->size(); ++i) {
          (*side)[i].tensor.mutable_grad() = at::full({5}, 0.1 * static_cast<double>(i + 1), dtype);
        }
      }
      optimizer.step(0.125);
      for (std::size_t i = 0; i < single.size(); ++i) single[i]->step(i == 0 ? 0.375 : 0.125);
    }
    for (std::size_t i = 0; i < together.size(); ++i) {
      EXPECT_TRUE(at::equal(together[i].tensor, apart[i].tensor)) << together[i].name << ", " << dtype;
    }
  }
}

TEST(Optimizer, AGroupHasItsOwnRateAndDecay) {
  expect_groups_are_optimizers<AdamW>(AdamWOptions{.weight_decay = 0.5});
  expect_groups_are_optimizers<Sgd>(SgdOptions{.momentum = 0.5, .weight_decay = 0.5});
  expect_groups_are_optimizers<Lion>(LionOptions{.weight_decay = 0.5});
  expect_groups_are_optimizers<Adadelta>(AdadeltaOptions{.weight_decay = 0.5});
}

// Runs three steps, moves the state into a fresh optimizer through TrainState, runs three more in both.
void expect_resumes_bitwise(const MakeOptimizer& make, std::size_t state_tensors_per_parameter) {
  auto parameters = golden_parameters();
  const auto optimizer = make(parameters);
  for (std::size_t step = 0; step < 3; ++step) {
    set_golden_gradients(parameters, step);
    optimizer->step(0.01);
  }
  auto resumed_parameters = golden_parameters();
  const auto resumed = make(resumed_parameters);
  TrainState saved, loaded;
  optimizer->collect_state(saved);
  resumed->collect_state(loaded);
  ASSERT_EQ(saved.tensors.size(), state_tensors_per_parameter * parameters.size());
  ASSERT_EQ(loaded.tensors.size(), saved.tensors.size());
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < saved.tensors.size(); ++i) {
      EXPECT_EQ(saved.tensors[i].name, loaded.tensors[i].name);
      loaded.tensors[i].tensor.copy_(saved.tensors[i].tensor);
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) resumed_parameters[i].tensor.copy_(parameters[i].tensor);
  }
  for (std::size_t step = 3; step < 6; ++step) {
    set_golden_gradients(parameters, step);
    set_golden_gradients(resumed_parameters, step);
    optimizer->step(0.01);
    resumed->step(0.01);
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(parameters[i].tensor, resumed_parameters[i].tensor)) << parameters[i].name;
  }
}

TEST(Optimizer, StateRoundTripsBitwise) {
  expect_resumes_bitwise(maker<AdamW>(AdamWOptions{}), 3);
  expect_resumes_bitwise(maker<Sgd>(SgdOptions{.momentum = 0.9}), 1);
  expect_resumes_bitwise(maker<Sgd>(SgdOptions{}), 0);
  expect_resumes_bitwise(maker<Lion>(LionOptions{}), 1);
  expect_resumes_bitwise(maker<Adadelta>(AdadeltaOptions{}), 2);
}

TEST(Optimizer, StateIsNamedByParameter) {
  AdamW optimizer({{"layers.0.weight", at::ones({2}).requires_grad_()}});
  TrainState state;
  optimizer.collect_state(state);
  std::vector<std::string> names;
  for (const auto& [name, tensor, shard] : state.tensors) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("optimizer.layers.0.weight.exp_avg", "optimizer.layers.0.weight.exp_avg_sq",
                                 "optimizer.layers.0.weight.step"));
}

TEST(Optimizer, ParametersWithoutGradientStayAsTheyAre) {
  const auto used = at::ones({3}).requires_grad_(), unused = at::ones({3}).requires_grad_();
  AdamW optimizer({{"used", used}, {"unused", unused}});
  used.mutable_grad() = at::ones({3});
  optimizer.step(0.1);
  EXPECT_TRUE(at::equal(unused, at::ones({3})));  // no decay either
  EXPECT_FALSE(at::equal(used, at::ones({3})));
  TrainState state;
  optimizer.collect_state(state);
  EXPECT_EQ(state.tensors[4].tensor.item<float>(), 1);  // steps are counted per parameter
  EXPECT_EQ(state.tensors[5].tensor.item<float>(), 0);
}

TEST(Optimizer, ZeroGradMakesGradientsUndefined) {
  const auto p = at::ones({3}).requires_grad_();
  Sgd optimizer({{"p", p}});
  p.mutable_grad() = at::ones({3});
  optimizer.zero_grad();
  EXPECT_FALSE(p.grad().defined());
}

TEST(Optimizer, MixesDtypes) {
  const auto p = at::ones({3}).requires_grad_(), q = at::ones({3}, at::kDouble).requires_grad_();
  Sgd optimizer({{"p", p}, {"q", q}});
  p.mutable_grad() = at::ones({3});
  q.mutable_grad() = at::ones({3}, at::kDouble);
  optimizer.step(0.25);
  EXPECT_TRUE(at::equal(p.detach(), at::full({3}, 0.75)));
  EXPECT_TRUE(at::equal(q.detach(), at::full({3}, 0.75, at::kDouble)));
}

template <class Body>
void expect_optimizer_error(const std::string& part, Body&& body) {
  EXPECT_THAT(error_text([&] { body(); }), HasSubstr(part));
}

TEST(Optimizer, NamesThatMatchAPatternDoNotDecay) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {  // our own kernels, libtorch's
    std::vector<NamedTensor> parameters;
    for (const std::string name : {"layers.0.attention_norm.weight", "layers.0.wq.weight", "layers.0.wq.bias", "norm.w",
                                   "layers.1.wq.weight", "biases"}) {
      parameters.push_back({name, at::ones({2}, dtype).requires_grad_()});
    }
    AdamW adamw(parameters, {.weight_decay = 0.5, .no_decay = {"*norm*", "*.bias", "layers.[1-9].*"}});
    Sgd sgd(parameters, {.weight_decay = 0.5, .no_decay = {"*norm*", "*.bias", "layers.[1-9].*"}});
    for (Optimizer* optimizer : {static_cast<Optimizer*>(&adamw), static_cast<Optimizer*>(&sgd)}) {
      {
        const at::NoGradGuard no_grad;
        for (const auto& parameter : parameters) parameter.tensor.fill_(1);
      }
      // With gradients of 0 decay is all that happens: 1 - lr * weight_decay.
      for (const auto& parameter : parameters) parameter.tensor.mutable_grad() = at::zeros({2}, dtype);
      optimizer->step(0.5);
      std::vector<double> values;
      for (const auto& parameter : parameters) values.push_back(parameter.tensor[1].item<double>());
      EXPECT_THAT(values, ElementsAre(1, 0.75, 1, 1, 1, 0.75)) << dtype;
    }
  }
}

TEST(Optimizer, RefusesWrongParametersAndOptions) {
  const auto p = at::ones({3}).requires_grad_();
  expect_optimizer_error("no parameters", [] { AdamW optimizer({}); });
  expect_optimizer_error("'a' is an undefined tensor", [] { AdamW optimizer({{"a", at::Tensor()}}); });
  expect_optimizer_error("'a' has dtype Long", [] { AdamW optimizer({{"a", at::ones({2}, at::kLong)}}); });
  expect_optimizer_error("two parameters are named 'a'", [&] { AdamW optimizer({{"a", p}, {"a", at::ones({2})}}); });
  expect_optimizer_error("'a' and 'b' are one tensor", [&] { AdamW optimizer({{"a", p}, {"b", p}}); });
  expect_optimizer_error("beta1 is 1", [&] { AdamW optimizer({{"a", p}}, {.beta1 = 1.0}); });
  expect_optimizer_error("beta2 is -1", [&] { AdamW optimizer({{"a", p}}, {.beta2 = -1.0}); });
  expect_optimizer_error("eps is 0", [&] { AdamW optimizer({{"a", p}}, {.eps = 0}); });
  expect_optimizer_error("weight_decay is -0.1", [&] { AdamW optimizer({{"a", p}}, {.weight_decay = -0.1}); });
  const std::vector<NamedTensor> named = {{"layers.0.wq.weight", p}, {"layers.0.ffn_norm.weight", at::ones({2})}};
  expect_optimizer_error(
      "AdamW: no_decay: pattern '*_nrom.*' matches none of the 2 parameters; the nearest is "
      "'layers.0.ffn_norm.weight'",
      [&] {
        AdamW optimizer(named, {.no_decay = {"*weight", "*_nrom.*"}});
      });
  expect_optimizer_error(
      "SGD: no_decay: pattern 'wq.weight' matches none of the 2 parameters; the nearest is "
      "'layers.0.wq.weight'",
      [&] { Sgd optimizer(named, {.no_decay = {"wq.weight"}}); });
  using Groups = std::vector<ParameterGroup>;
  for (const auto& [groups, text] : std::vector<std::pair<Groups, std::string>>{
           {{{.params = {"*norm*"}, .lr_factor = 2}, {.params = {"*ffn*", "*wq*"}, .lr_factor = 3}},
            "AdamW: parameter 'layers.0.ffn_norm.weight' belongs to group 1 (\"*norm*\") and to group 2 (\"*ffn*\", "
            "\"*wq*\"): expected one group at most"},
           {{{.params = {"*wq*", "*nrom*"}, .lr_factor = 2}},
            "AdamW: group 1 (\"*wq*\", \"*nrom*\"): pattern '*nrom*' matches none of the 2 parameters; the nearest is "
            "'layers.0.ffn_norm.weight'"},
           {{{.params = {"*wq*"}, .weight_decay = 0.5}},
            "AdamW: parameter 'layers.0.wq.weight' is named by no_decay, and group 1 (\"*wq*\") sets its weight_decay "
            "to "
            "0.5: expected one of them"},
           {{{.params = {"*wq*"}, .lr_factor = 0}}, "group 1 (\"*wq*\"): lr_factor is 0: expected a positive number"},
           {{{.params = {"*ffn*"}, .weight_decay = -1}}, "group 1 (\"*ffn*\"): weight_decay is -1: expected 0"}}) {
    expect_optimizer_error(text,
                           [&, &groups = groups] { AdamW optimizer(named, {.no_decay = {"*wq*"}, .groups = groups}); });
  }
  expect_optimizer_error("momentum is 1", [&] { Sgd optimizer({{"a", p}}, {.momentum = 1}); });
  expect_optimizer_error("weight_decay is -0.1", [&] { Sgd optimizer({{"a", p}}, {.weight_decay = -0.1}); });
  expect_optimizer_error("nesterov needs a momentum", [&] { Sgd optimizer({{"a", p}}, {.nesterov = true}); });
}

}  // namespace
}  // namespace phalanx
