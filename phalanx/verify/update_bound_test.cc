#include "phalanx/verify/update_bound.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>

#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/sgd.h"

namespace phalanx::verify {
namespace {

at::Tensor numbers(std::int64_t count, const std::string& name, double size) {
  at::Tensor x = at::zeros({count});
  fill(x, Init::normal(0.0, size), 5, name);
  return x;
}

TEST(UpdateBound, OfEqualGradientsIsNothingAndOfOppositeOnesTwoRates) {
  UpdateBound bound(config::TrainConfig::Optimizer{.name = "AdamW"});
  const at::Tensor g = at::tensor({1e-3F, -2.0F, 0.0F});
  bound.add("same", g, g);
  bound.add("opposite", g, -g);
  bound.end_step({.found = 1, .expected = 1});
  EXPECT_EQ(bound.of("same", 0.5), 0);
  EXPECT_DOUBLE_EQ(bound.of("opposite", 0.5), 0.5 * 2 * std::sqrt(2.0));
  EXPECT_EQ(bound.of("of which nothing is known", 0.5), 0);
  // The difference of the norm counts through clipping.
  UpdateBound clipped(config::TrainConfig::Optimizer{.name = "AdamW"});
  clipped.add("same", g, g);
  clipped.end_step({.found = 1.01, .expected = 1});
  EXPECT_NEAR(clipped.of("same", 0.5), 0.5 * 2 * 0.01 * std::sqrt(3.0), 1e-12);
}

TEST(UpdateBound, OfSgdIsTheDifferenceTimesTheRate) {
  UpdateBound bound(config::TrainConfig::Optimizer{.name = "SGD", .momentum = 0.5});
  const at::Tensor g = at::full({4}, 2.0F);
  bound.add("w", g + 0.25, g);
  bound.end_step({.found = 1, .expected = 1, .factor = 0.5});
  EXPECT_DOUBLE_EQ(bound.of("w", 0.1), 0.1 * 0.125 * 2);
  bound.add("w", g, g);
  bound.end_step({.found = 1, .expected = 1, .factor = 0.5});
  EXPECT_DOUBLE_EQ(bound.of("w", 0.1), 0.1 * 0.125 * 0.5 * 2);  // what momentum has left of it
}

// Two optimizers whose gradients differ by rounding, at weights that are made equal after each step. Their weights
// never diverge by more than the bound, at any learning rate; at large rates they come close to it.
TEST(UpdateBound, HoldsForTheOptimizersThemselves) {
  constexpr std::int64_t kCount = 4000;
  for (const std::string name : {"AdamW", "SGD"}) {
    for (const double off : {1e-5, 1e-2, 0.3}) {
      for (const double lr : {1e-4, 1.0}) {
        const config::TrainConfig::Optimizer config{.name = name, .momentum = 0.9};
        UpdateBound bound(config);
        at::Tensor a = numbers(kCount, "w", 0.02).set_requires_grad(true), b = a.detach().clone();
        b.set_requires_grad(true);
        const auto make = [&](const at::Tensor& w) -> std::unique_ptr<Optimizer> {
          if (name == "SGD")
            return std::make_unique<Sgd>(std::vector<NamedTensor>{{"w", w}}, SgdOptions{.momentum = 0.9});
          return std::make_unique<AdamW>(std::vector<NamedTensor>{{"w", w}}, AdamWOptions{});
        };
        const auto first = make(a), second = make(b);
        double least = 1;
        for (int step = 0; step < 6; ++step) {
          const std::string number = std::to_string(step);
          const at::Tensor g = numbers(kCount, "g" + number, step == 0 ? 1.0 : 0.1);
          const at::Tensor other = g + numbers(kCount, "off" + number, off * (step == 0 ? 1.0 : 0.1));
          a.mutable_grad() = g.clone();
          b.mutable_grad() = other.clone();
          bound.add("w", g, other);
          bound.end_step({.found = 1, .expected = 1});
          first->step(lr);
          second->step(lr);
          const at::NoGradGuard no_grad;
          const double apart = (a - b).norm().item<double>();
          const double rounding = 1e-6 * a.norm().item<double>();
          EXPECT_LE(apart, bound.of("w", lr) + rounding) << name << ", " << off << ", lr " << lr << ", step " << step;
          if (lr == 1 && off > 1e-3) least = std::min(least, apart / bound.of("w", lr));
          b.copy_(a);
        }
        EXPECT_GT(least, 0.02) << name << ", " << off << ", lr " << lr;
      }
    }
  }
}

}  // namespace
}  // namespace phalanx::verify
