// Losses of a router, against their formulas, and of parts of sequences against
// whole ones.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "phalanx/nn/mixture_of_experts.h"

namespace phalanx::nn::router_test {
namespace {

constexpr std::int64_t kExperts = 4, kEach = 2;

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

}  // namespace
}  // namespace phalanx::nn::router_test
