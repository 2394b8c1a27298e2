// Losses and noise of a router, and the capacity of experts, against their formulas, and of parts of sequences against
// whole ones.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/nn/mixture_of_experts.h"

namespace phalanx::nn::router_test {
namespace {

constexpr std::int64_t kExperts = 4, kEach = 2;

void scramble(Module& module) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : module.parameters()) parameter.copy_(at::randn(parameter.sizes()));
}

/// The positions of a rank's pieces of whole sequences [sequences, T, ...].
at::Tensor pieces_of(const at::Tensor& whole, const ContextCut& cut) {
  const auto [head, tail] = cut.ranges(whole.size(1));
  return at::cat({whole.narrow(1, head.first, head.count), whole.narrow(1, tail.first, tail.count)}, 1);
}

/// What each rank of a cut computes, if `run(cut, sum)` sums its counts over them: once to see what each rank has, and
/// once with the sum.
template <class Run>
std::vector<at::Tensor> on_ranks(std::int64_t ranks, const Run& run) {
  at::Tensor all;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    run(ContextCut{.ranks = ranks, .rank = rank},
        [&](const at::Tensor& counts) { all = all.defined() ? all + counts : counts.clone(); });
  }
  std::vector<at::Tensor> results;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    results.push_back(
        run(ContextCut{.ranks = ranks, .rank = rank}, [&](const at::Tensor& counts) { counts.copy_(all); }));
  }
  return results;
}

/// The loss that evens out the load, written out: of each unit of sequences, with its share of them.
at::Tensor load_loss(const at::Tensor& p, const at::Tensor& chosen, std::int64_t sequences_of_unit, double weight) {
  at::Tensor loss = at::zeros({});
  for (std::int64_t first = 0; first < p.size(0); first += sequences_of_unit) {
    const at::Tensor of_unit = p.narrow(0, first, sequences_of_unit).flatten(0, 1);
    const at::Tensor choices = chosen.narrow(0, first, sequences_of_unit).flatten();
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const at::Tensor share = (choices == e).sum().to(at::kFloat) / static_cast<double>(choices.numel());
      loss = loss + of_unit.select(1, e).mean() * share * (weight * kExperts * static_cast<double>(sequences_of_unit));
    }
  }
  return loss;
}

TEST(RouterLosses, EachUnitHasTheGradientOfItsFormula) {
  const at::Tensor logits = at::randn({3, 10, kExperts});
  const at::Tensor p = at::softmax(logits, -1).requires_grad_();
  const at::Tensor chosen = std::get<1>(at::topk(p.detach(), kEach, -1));
  for (const auto& [unit, sequences_of_unit] : {std::pair(LoadUnit::sequence, 1), {LoadUnit::pass, 3}}) {
    load_loss(p, chosen, sequences_of_unit, 0.3).backward();
    const at::Tensor expected = p.grad().clone();
    p.mutable_grad().reset();
    const at::Tensor scores = with_load_loss(p.view({30, kExperts}), chosen.view({30, kEach}), 3, RouterForm::softmax,
                                             {.load_weight = 0.3, .load_unit = unit});
    (scores * 0).sum().backward();
    EXPECT_TRUE(at::allclose(p.grad(), expected, 1e-5, 1e-7)) << sequences_of_unit;
    p.mutable_grad().reset();
  }
}

// Ranks with parts of the sequences, as of context parallelism, or with other sequences, as of data parallelism.
TEST(RouterLosses, RanksThatSumTheirCountsHaveTheGradientOfOne) {
  const at::Tensor p = at::softmax(at::randn({4, 12, kExperts}), -1);
  const at::Tensor chosen = std::get<1>(at::topk(p, kEach, -1));
  const auto gradient_of = [](const at::Tensor& scores, const at::Tensor& choices, const RouterLosses& losses) {
    const at::Tensor leaf = scores.clone().requires_grad_();
    const at::Tensor with =
        with_load_loss(leaf.flatten(0, 1), choices.flatten(0, 1), scores.size(0), RouterForm::softmax, losses);
    (with * 0).sum().backward();
    return leaf.grad();
  };
  for (const LoadUnit unit : {LoadUnit::sequence, LoadUnit::pass}) {
    const at::Tensor whole = gradient_of(p, chosen, {.load_weight = 0.3, .load_unit = unit});
    const auto parts = on_ranks(3, [&](const ContextCut& cut, const std::function<void(const at::Tensor&)>& sum) {
      return gradient_of(pieces_of(p, cut), pieces_of(chosen, cut),
                         {.load_weight = 0.3, .load_unit = unit, .sequence_ranks = cut.ranks, .sum_counts = sum});
    });
    for (std::int64_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(at::equal(parts[static_cast<std::size_t>(rank)], pieces_of(whole, {.ranks = 3, .rank = rank})));
    }
  }
  const at::Tensor whole = gradient_of(p, chosen, {.load_weight = 0.3, .load_unit = LoadUnit::pass});
  const auto parts = on_ranks(2, [&](const ContextCut& cut, const std::function<void(const at::Tensor&)>& sum) {
    return gradient_of(p.narrow(0, 2 * cut.rank, 2), chosen.narrow(0, 2 * cut.rank, 2),
                       {.load_weight = 0.3, .load_unit = LoadUnit::pass, .sum_counts = sum});
  });
  EXPECT_TRUE(at::equal(at::cat(parts), whole));
}

TEST(RouterJitter, IsAFunctionOfThePlaceInTheRun) {
  const at::Tensor ones = at::ones_like(at::zeros({4, 12, 5}));
  const RouterJitter jitter{.eps = 0.1, .layer = "layers.1.moe", .place = {.seed = 7, .step = 3, .first_row = 2}};
  const at::Tensor whole = with_jitter(ones, jitter);
  EXPECT_GE(whole.min().item<double>(), 0.9);
  EXPECT_LT(whole.max().item<double>(), 1.1);
  EXPECT_LT(whole.min().item<double>(), 0.91);
  EXPECT_GT(whole.max().item<double>(), 1.09);
  EXPECT_NEAR(whole.mean().item<double>(), 1, 0.02);
  EXPECT_TRUE(at::equal(with_jitter(ones, jitter), whole));
  const auto changed = [&](const std::function<void(RouterJitter&)>& change) {
    RouterJitter other = jitter;
    change(other);
    return with_jitter(ones, other);
  };
  EXPECT_FALSE(at::equal(changed([](RouterJitter& one) { one.place.seed = 8; }), whole));
  EXPECT_FALSE(at::equal(changed([](RouterJitter& one) { one.place.step = 4; }), whole));
  EXPECT_FALSE(at::equal(changed([](RouterJitter& one) { one.layer = "layers.2.moe"; }), whole));
  EXPECT_TRUE(
      at::equal(changed([](RouterJitter& one) { one.place.first_row = 3; }).narrow(0, 0, 3), whole.narrow(0, 1, 3)));
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    const ContextCut cut{.ranks = 3, .rank = rank};
    RouterJitter of_rank = jitter;
    of_rank.cut = cut;
    EXPECT_TRUE(at::equal(with_jitter(pieces_of(ones, cut), of_rank), pieces_of(whole, cut))) << rank;
    const kernels::HostGpuKernels use;
    EXPECT_TRUE(at::equal(with_jitter(ones, jitter), whole));
    EXPECT_TRUE(at::equal(with_jitter(pieces_of(ones, cut), of_rank), pieces_of(whole, cut))) << rank;
  }
}

TEST(RouterJitter, ChangesWhatTheRouterSeesInTrainingAlone) {
  MixtureOfExperts mixture({.dim = 4, .hidden = 6, .experts = kExperts, .experts_per_token = kEach});
  scramble(mixture);
  const at::Tensor x = at::randn({2, 6, 4});
  const at::Tensor without = call(mixture, x);
  mixture.set_jitter({.eps = 0.3, .layer = "layers.0.moe", .place = {.seed = 1}});
  at::Tensor seen;
  mixture.set_choose([&](const RouterChoice& choice) {
    seen = choice.logits;
    return choice.experts;
  });
  EXPECT_FALSE(at::equal(call(mixture, x), without));
  EXPECT_TRUE(
      at::allclose(seen, at::linear(with_jitter(x, mixture.jitter()), mixture.gate->weight).flatten(0, 1), 1e-4, 1e-5));
  EXPECT_THROW(call(mixture, x.flatten(0, 1)), Error);
  const at::Tensor turned = x.transpose(0, 1);
  EXPECT_TRUE(at::equal(call(mixture, turned), call(mixture, turned.contiguous())));
  mixture.eval();
  EXPECT_TRUE(at::equal(call(mixture, x), without));
  // A router that scores all experts alike does not see the noise, and the experts must not.
  mixture.train();
  {
    const at::NoGradGuard no_grad;
    mixture.gate->weight.zero_();
  }
  const at::Tensor noisy = call(mixture, x);
  mixture.set_jitter({});
  EXPECT_TRUE(at::equal(call(mixture, x), noisy));
}

// With experts whose results count for nothing, x's gradient is that of a loss of the logits, through the gate and the
// noise.
TEST(RouterJitter, LogitsHaveTheGatesTypeAndXTheGradientOfTheProduct) {
  constexpr double kWeight = 0.7;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const bool float32_router : {false, true}) {
      SCOPED_TRACE(testing::Message() << type << (float32_router ? ", router in float32" : ""));
      MixtureOfExperts mixture(
          {.dim = 16, .hidden = 6, .experts = kExperts, .experts_per_token = kEach, .float32_router = float32_router},
          {.dtype = type});
      scramble(mixture);
      mixture.set_jitter({.eps = 0.5, .layer = "layers.0.moe", .place = {.seed = 1}});
      mixture.set_losses({.z_weight = kWeight});
      at::Tensor logits;
      mixture.set_choose([&](const RouterChoice& choice) {
        logits = choice.logits;
        return choice.experts;
      });
      const at::Tensor x = at::randn({2, 6, 16}).to(type).requires_grad_();
      (call(mixture, x) * 0).sum().backward();
      EXPECT_EQ(logits.scalar_type(), float32_router ? at::kFloat : type);
      EXPECT_EQ(x.grad().scalar_type(), type);

      const at::Tensor noise = with_jitter(at::ones_like(x.detach()), mixture.jitter());
      const at::Tensor wide = x.detach().to(at::kFloat).requires_grad_();
      const at::Tensor expected = at::linear(wide * noise, mixture.gate->weight.detach().to(at::kFloat));
      (at::logsumexp(expected, -1).square().sum() * kWeight).backward();
      const double tolerance = type == at::kFloat ? 1e-5 : 3e-2;
      const auto difference = [](const at::Tensor& found, const at::Tensor& of) {
        return ((found.to(at::kFloat) - of).norm() / of.norm()).item<double>();
      };
      EXPECT_LT(difference(logits, expected.detach().flatten(0, 1)), tolerance);
      EXPECT_LT(difference(x.grad(), wide.grad()), tolerance);
    }
  }
}

/// A token at a time, by position.
at::Tensor kept_one_by_one(const at::Tensor& chosen, std::int64_t most) {
  const at::Tensor kept = at::zeros_like(chosen, at::kBool);
  for (std::int64_t s = 0; s < chosen.size(0); ++s) {
    std::vector<std::int64_t> taken(kExperts);
    for (std::int64_t t = 0; t < chosen.size(1); ++t) {
      for (std::int64_t i = 0; i < kEach; ++i) {
        auto& of_expert = taken[static_cast<std::size_t>(chosen[s][t][i].item<std::int64_t>())];
        kept[s][t][i].fill_(of_expert++ < most);
      }
    }
  }
  return kept;
}

TEST(ExpertCapacity, TheFirstTokensOfASequenceAreKept) {
  const at::Tensor chosen = std::get<1>(at::topk(at::randn({3, 12, kExperts}), kEach, -1));
  for (const double factor : {0.1, 0.5, 0.75, 1.0, 2.0}) {
    const std::int64_t most = tokens_of_expert(factor, 12, kEach, kExperts);
    EXPECT_EQ(most, factor == 0.1 ? 1 : static_cast<std::int64_t>(factor * 6 + 0.5)) << factor;
    const at::Tensor whole = kept_one_by_one(chosen, most);
    EXPECT_TRUE(at::equal(within_capacity(chosen.flatten(0, 1), 3, kExperts, {.factor = factor}), whole.flatten(0, 1)));
    for (const std::int64_t ranks : {2, 3}) {
      const auto parts = on_ranks(ranks, [&](const ContextCut& cut, const std::function<void(const at::Tensor&)>& sum) {
        return within_capacity(pieces_of(chosen, cut).flatten(0, 1), 3, kExperts,
                               {.factor = factor, .cut = cut, .sum_counts = sum});
      });
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const at::Tensor expected = pieces_of(whole, {.ranks = ranks, .rank = rank}).flatten(0, 1);
        EXPECT_TRUE(at::equal(parts[static_cast<std::size_t>(rank)], expected)) << ranks << " " << rank;
      }
    }
  }
}

TEST(ExpertCapacity, IsRoundedUpOnceAndNeverMoreThanTheTokens) {
  EXPECT_EQ(tokens_of_expert(1.1, 100, 2, 4), 55);
  EXPECT_EQ(tokens_of_expert(1.11, 100, 2, 4), 56);
  EXPECT_EQ(tokens_of_expert(1e-30, 100, 2, 4), 1);
  EXPECT_EQ(tokens_of_expert(2, 100, 2, 4), 100);
  EXPECT_EQ(tokens_of_expert(1e30, 100, 2, 4), 100);
  const at::Tensor chosen = std::get<1>(at::topk(at::randn({10, kExperts}), kEach, -1));
  EXPECT_TRUE(within_capacity(chosen, 2, kExperts, {.factor = 1e30}).all().item<bool>());
}

// The results and gradients of what is kept, with the weights that tokens have without a capacity.
TEST(ExpertCapacity, ADroppedTokenGetsZeroFromItsExpert) {
  MixtureOfExperts mixture(
      {.dim = 4, .hidden = 6, .experts = kExperts, .experts_per_token = kEach, .shared_hidden = 3});
  scramble(mixture);
  const at::Tensor x = at::randn({2, 8, 4}).requires_grad_();
  const at::Tensor p = at::softmax(at::linear(x, mixture.gate->weight), -1);
  const at::Tensor chosen = std::get<1>(at::topk(p.detach(), kEach, -1));
  const at::Tensor kept = kept_one_by_one(chosen, 3);
  const at::Tensor of_chosen = p.gather(-1, chosen);
  const at::Tensor weights = of_chosen / of_chosen.sum(-1, /*keepdim=*/true) * kept;
  at::Tensor expected = call(mixture.shared_experts, x);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const auto& net = *mixture.experts->nets().at(e);
    const at::Tensor h = at::silu(at::linear(x, net.w1->weight)) * at::linear(x, net.w3->weight);
    const at::Tensor weight = (weights * (chosen == e)).sum(-1, /*keepdim=*/true);
    expected = expected + at::linear(h, net.w2->weight) * weight;
  }
  const auto gradients = [&](const at::Tensor& y) {
    mixture.zero_grad();
    x.mutable_grad().reset();
    (y * y).sum().backward();
    std::vector<at::Tensor> all = {x.grad().clone()};
    for (const auto& parameter : mixture.parameters()) all.push_back(parameter.grad().clone());
    return all;
  };
  const std::vector<at::Tensor> wanted = gradients(expected);
  const at::Tensor counts = at::zeros({kExperts}, at::kLong), dropped = at::zeros({}, at::kLong);
  mixture.set_tensors({.bias = {}, .counts = counts, .dropped = dropped});
  mixture.set_capacity({.factor = 0.75});  // 3 of the 8 tokens of a sequence
  const at::Tensor found = call(mixture, x);
  EXPECT_TRUE(at::allclose(found, expected, 1e-4, 1e-4));
  const std::vector<at::Tensor> made = gradients(found);
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::allclose(made[i], wanted[i], 1e-4, 1e-3)) << i;
  EXPECT_GT(dropped.item<std::int64_t>(), 0);
  EXPECT_EQ(dropped.item<std::int64_t>(), kept.logical_not().sum().item<std::int64_t>());
  EXPECT_EQ(counts.sum().item<std::int64_t>(), chosen.numel());  // of what routers choose
  mixture.eval();
  const at::Tensor evaluated = call(mixture, x);
  mixture.set_capacity({});
  EXPECT_TRUE(at::equal(call(mixture, x), evaluated));
  EXPECT_FALSE(at::allclose(evaluated, expected, 1e-2, 1e-2));
}

}  // namespace
}  // namespace phalanx::nn::router_test
