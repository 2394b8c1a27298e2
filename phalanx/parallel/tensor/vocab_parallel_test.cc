// The split head against the head on one rank, in every dtype, over one block of tokens and several.
#include "phalanx/parallel/tensor/vocab_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>

#include "phalanx/base/error.h"
#include "phalanx/base/ignored_label.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/kernels/linear_cross_entropy.h"
#include "phalanx/parallel/tensor/functional_collectives.h"

namespace phalanx {
namespace {

using Ranks = std::shared_ptr<Communicator>;
constexpr std::int64_t kIds = 24, kHeadWidth = 6;

struct HeadCase {
  at::Tensor h, weight, labels;
};

HeadCase head_case(std::int64_t tokens, at::ScalarType dtype) {
  return {at::sin(at::arange(tokens * kHeadWidth, at::kFloat)).mul(3).view({tokens / 2, 2, kHeadWidth}).to(dtype),
          at::sin(at::arange(kIds * kHeadWidth, at::kFloat).mul(0.3)).view({kIds, kHeadWidth}).to(dtype),
          at::arange(tokens, at::kLong).mul(5).remainder(kIds).view({tokens / 2, 2})};
}

double relative_distance(const at::Tensor& a, const at::Tensor& b) {
  return a.sub(b).to(at::kDouble).norm().item<double>() / b.to(at::kDouble).norm().item<double>();
}

class VocabParallel : public ::testing::TestWithParam<int> {};

// 1 / divisor alone would be lost in float16, which a loss is scaled for.
TEST_P(VocabParallel, GradientsOfSixteenBitsAreNotLostWhereTheDivisorIsLarge) {
  constexpr double kDivisor = 1 << 19, kLossScale = 1 << 16;
  constexpr std::int64_t kTokens = 1300;
  for (const bool has_token_weights : {false, true}) {
    const at::Tensor token_weights =
        has_token_weights ? at::full({kTokens / 2, 2}, 1.0 / 64, at::kFloat) : at::Tensor();
    const HeadCase one = head_case(kTokens, at::kHalf);
    const at::Tensor h = one.h.to(at::kFloat).requires_grad_(), weight = one.weight.to(at::kFloat).requires_grad_();
    kernels::linear_cross_entropy(h, weight, one.labels, kDivisor, 0, token_weights).mul(kLossScale).backward();
    run_local_ranks(GetParam(), [&](const Ranks& comm) {
      const std::int64_t rows = kIds / comm->size(), first = comm->rank() * rows;
      for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
        const at::Tensor own_h = one.h.clone().to(type).requires_grad_(),
                         own = one.weight.narrow(0, first, rows).clone().to(type).requires_grad_();
        vocab_parallel_cross_entropy(own_h, own, one.labels, {.first = first, .count = kIds}, comm, kDivisor, 0,
                                     token_weights)
            .mul(kLossScale)
            .backward();
        at::Tensor sum = own_h.grad().to(at::kFloat);
        comm->all_reduce(sum);
        const double tolerance = type == at::kHalf ? 5e-3 : 3e-2;  // some roundings of 0.05 % or 0.4 %, in blocks
        EXPECT_LT(relative_distance(sum, h.grad()), tolerance) << type << has_token_weights;
        EXPECT_LT(relative_distance(own.grad().to(at::kFloat), weight.grad().narrow(0, first, rows)), tolerance)
            << type << has_token_weights;
      }
    });
  }
}

TEST_P(VocabParallel, LossAndGradientsAreThoseOfOneRank) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const std::int64_t tokens : {10, 1300}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens of " << c10::toString(dtype));
      const double tolerance = dtype == at::kBFloat16 ? 2e-2 : 2e-6;
      const HeadCase one = head_case(tokens, dtype);
      one.h.set_requires_grad(true);
      one.weight.set_requires_grad(true);
      const at::Tensor expected = kernels::linear_cross_entropy(one.h, one.weight, one.labels);
      expected.mul(3).backward();
      run_local_ranks(GetParam(), [&](const Ranks& comm) {
        const std::int64_t rows = kIds / comm->size(), first = comm->rank() * rows;
        const HeadCase all = head_case(tokens, dtype);
        const at::Tensor h = all.h.requires_grad_(),
                         weight = all.weight.narrow(0, first, rows).clone().requires_grad_();
        const at::Tensor loss = vocab_parallel_cross_entropy(copy_to_group(h, comm), weight, all.labels,
                                                             {.first = first, .count = kIds}, comm);
        EXPECT_EQ(loss.scalar_type(), at::kFloat);
        EXPECT_NEAR(loss.item<double>(), expected.item<double>(), tolerance * expected.item<double>());
        const at::Tensor of_first = loss.detach().clone();
        comm->broadcast(of_first);
        EXPECT_TRUE(at::equal(of_first, loss));  // the same bits on every rank
        loss.mul(3).backward();
        EXPECT_LT(relative_distance(h.grad(), one.h.grad()), tolerance);
        EXPECT_LT(relative_distance(weight.grad(), one.weight.grad().narrow(0, first, rows)), tolerance);
        EXPECT_THROW(loss.backward(), Error);
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(
            vocab_parallel_cross_entropy(h, weight, all.labels, {.first = first, .count = kIds}, comm), of_first));
      });
    }
  }
}

// Its second factor is cut as the weight is.
TEST_P(VocabParallel, AProductOfLowRankIsAddedToTheLogits) {
  for (const std::int64_t tokens : {10, 1300}) {
    SCOPED_TRACE(tokens);
    constexpr std::int64_t kRank = 2;
    const auto low_rank = [&] {
      return kernels::LowRank{
          at::sin(at::arange(tokens * kRank, at::kFloat).mul(0.7)).view({tokens / 2, 2, kRank}).requires_grad_(),
          at::sin(at::arange(kIds * kRank, at::kFloat).mul(0.9)).view({kIds, kRank}).requires_grad_()};
    };
    const HeadCase one = head_case(tokens, at::kFloat);
    const at::Tensor x = one.h.set_requires_grad(true);
    const kernels::LowRank whole = low_rank();
    const at::Tensor expected = kernels::linear_cross_entropy(x, one.weight, one.labels, 7.0, 0.01, {}, whole);
    const at::Tensor losses = kernels::linear_token_losses(x, one.weight, one.labels, whole);
    expected.mul(3).backward();
    run_local_ranks(GetParam(), [&](const Ranks& comm) {
      const std::int64_t rows = kIds / comm->size(), first = comm->rank() * rows;
      const HeadCase all = head_case(tokens, at::kFloat);
      const at::Tensor h = all.h.requires_grad_(), weight = all.weight.narrow(0, first, rows);
      const at::Tensor low_x = low_rank().x,
                       low_weight = low_rank().weight.detach().narrow(0, first, rows).clone().requires_grad_();
      const VocabShard part{.first = first, .count = kIds};
      const kernels::LowRank low{copy_to_group(low_x, comm), low_weight};
      const at::Tensor loss =
          vocab_parallel_cross_entropy(copy_to_group(h, comm), weight, all.labels, part, comm, 7.0, 0.01, {}, low);
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 2e-6 * expected.item<double>());
      loss.mul(3).backward();
      EXPECT_LT(relative_distance(h.grad(), x.grad()), 2e-6);
      EXPECT_LT(relative_distance(low_x.grad(), whole.x.grad()), 2e-6);
      EXPECT_LT(relative_distance(low_weight.grad(), whole.weight.grad().narrow(0, first, rows)), 2e-6);
      EXPECT_LT(relative_distance(vocab_parallel_token_losses(h, weight, all.labels, part, comm, low), losses), 2e-6);
    });
  }
}
INSTANTIATE_TEST_SUITE_P(Worlds, VocabParallel, ::testing::Values(1, 2, 4));

TEST(VocabParallelLabels, IgnoredOnesHaveNoLossAndADivisorIsTheCallers) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor some = at::cos(at::arange(1300, at::kFloat)).view({650, 2}), none;
    for (const auto& [divisor, z_loss_weight, weights] : {std::tuple(std::optional<double>(), 0.0, none),
                                                          {std::optional<double>(17.0), 0.0, none},
                                                          {std::nullopt, 0.05, none},
                                                          {std::optional<double>(3.0), 0.0, some}}) {
      const auto make = [&] {
        HeadCase made = head_case(1300, dtype);
        made.labels.masked_fill_(at::arange(1300, at::kLong).view({650, 2}).remainder(3) == 1, kIgnoredLabel);
        made.h.set_requires_grad(true);
        made.weight.set_requires_grad(true);
        return made;
      };
      const HeadCase one = make();
      const at::Tensor expected =
          kernels::linear_cross_entropy(one.h, one.weight, one.labels, divisor, z_loss_weight, weights);
      const at::Tensor each = kernels::linear_token_losses(one.h, one.weight, one.labels);
      expected.backward();
      run_local_ranks(
          2, [&, &divisor = divisor, &z_loss_weight = z_loss_weight, &weights = weights](const Ranks& comm) {
            const HeadCase all = make();
            const std::int64_t first = comm->rank() * kIds / 2;
            const at::Tensor weight = all.weight.detach().narrow(0, first, kIds / 2).clone().requires_grad_();
            const at::Tensor loss =
                vocab_parallel_cross_entropy(copy_to_group(all.h, comm), weight, all.labels,
                                             {.first = first, .count = kIds}, comm, divisor, z_loss_weight, weights);
            EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 2e-6 * each.sum().item<double>());
            EXPECT_LT(relative_distance(
                          vocab_parallel_token_losses(all.h, weight, all.labels, {.first = first, .count = kIds}, comm),
                          each),
                      2e-6);
            loss.backward();
            EXPECT_LT(relative_distance(all.h.grad(), one.h.grad()), 2e-6);
            EXPECT_LT(relative_distance(weight.grad(), one.weight.grad().narrow(0, first, kIds / 2)), 2e-6);
          });
    }
  }
}

TEST(VocabParallelExtremes, LargeLogitsOnOneRankAlone) {
  run_local_ranks(2, [](const Ranks& comm) {
    const at::Tensor h = at::ones({3, 1}), weight = at::zeros({2, 1}).fill_(comm->rank() == 0 ? 900.0 : -900.0);
    const auto loss_of = [&](std::int64_t label) {
      return vocab_parallel_cross_entropy(h, weight, at::zeros({3}, at::kLong).fill_(label),
                                          {.first = 2 * comm->rank(), .count = 4}, comm)
          .item<double>();
    };
    EXPECT_NEAR(loss_of(1), std::log(2.0), 1e-6);
    EXPECT_NEAR(loss_of(3), 1800 + std::log(2.0), 1e-3);
  });
}

TEST(VocabParallelErrors, ALabelOutsideOfTheVocabularyIsNamedOnEveryRank) {
  run_local_ranks(2, [](const Ranks& comm) {
    HeadCase c = head_case(10, at::kFloat);
    c.labels.view({-1}).narrow(0, 7, 1).fill_(kIds);
    EXPECT_THAT(error_text<DataError>([&] {
                  vocab_parallel_cross_entropy(c.h, c.weight.narrow(0, 0, 12), c.labels, {.first = 0, .count = kIds},
                                               comm);
                }),
                HasSubstr("label 24 (the 7th of the batch) is outside the vocabulary: "
                          "expected 0 to 23"));
  });
}

}  // namespace
}  // namespace phalanx
