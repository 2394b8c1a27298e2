// A layer whose experts are divided among ranks against the same layer on one rank that has all tokens.
#include "phalanx/parallel/expert/expert_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/sin.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/nn/init.h"

namespace phalanx::expert_parallel_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr std::int64_t kDim = 6, kExperts = 8, kTokens = 24;

nn::MixtureOptions options() { return {.dim = kDim, .hidden = 10, .experts = kExperts, .experts_per_token = 2}; }

at::Tensor values(std::int64_t rows, double phase) {
  return at::sin(at::arange(rows * kDim, at::kDouble).mul(0.7).add(phase)).to(at::kFloat).view({rows, kDim});
}

struct Whole {
  nn::MixtureOfExperts mixture{options()};
  at::Tensor x = values(kTokens, 0.1).requires_grad_();
  at::Tensor y;
};

/// One rank with all tokens, after its backward pass.
std::shared_ptr<Whole> on_one_rank() {
  auto whole = std::make_shared<Whole>();
  nn::initialise(whole->mixture, 5);
  whole->y = nn::call(whole->mixture, whole->x);
  (whole->y * values(kTokens, 0.9)).sum().backward();
  return whole;
}

class ExpertParallel : public ::testing::TestWithParam<int> {};

// Ranks have unequal numbers of tokens; the last one of four has none.
TEST_P(ExpertParallel, OutputsAndGradientsAreThoseOfOneRank) {
  const int ranks = GetParam();
  const std::shared_ptr<Whole> whole = on_one_rank();
  const std::vector<std::int64_t> cuts = ranks == 1   ? std::vector<std::int64_t>{0, 24}
                                         : ranks == 2 ? std::vector<std::int64_t>{0, 5, 24}
                                                      : std::vector<std::int64_t>{0, 7, 8, 24, 24};
  run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& comm) {
    const std::int64_t first = cuts[static_cast<std::size_t>(comm->rank())];
    const std::int64_t count = cuts[static_cast<std::size_t>(comm->rank()) + 1] - first;
    nn::MixtureOfExperts mixture(options(), {.without_memory = true});
    distribute_experts(mixture, comm);
    nn::initialise(mixture, 5);
    EXPECT_EQ(mixture.experts->nets().size(), static_cast<std::size_t>(kExperts / ranks));
    const at::Tensor x = whole->x.detach().narrow(0, first, count).clone().requires_grad_();
    const at::Tensor y = nn::call(mixture, x);
    EXPECT_TRUE(at::allclose(y, whole->y.narrow(0, first, count), 1e-5, 1e-6));
    (y * values(kTokens, 0.9).narrow(0, first, count)).sum().backward();
    EXPECT_TRUE(at::allclose(x.grad(), whole->x.grad().narrow(0, first, count), 1e-5, 1e-6));
    for (const auto& [number, net] : mixture.experts->nets()) {
      const auto& same = *whole->mixture.experts->nets().at(number);
      ASSERT_TRUE(at::equal(net->w2->weight, same.w2->weight)) << number;
      for (const auto& parameter : net->named_parameters()) {
        const at::Tensor expected = same.named_parameters()[parameter.key()].grad();
        EXPECT_TRUE(at::allclose(parameter.value().grad(), expected, 1e-5, 1e-6)) << number << " " << parameter.key();
      }
    }
    const at::Tensor gate = mixture.gate->weight.grad().clone();
    comm->all_reduce(gate);
    EXPECT_TRUE(at::allclose(gate, whole->mixture.gate->weight.grad(), 1e-5, 1e-6));
  });
}
INSTANTIATE_TEST_SUITE_P(Ranks, ExpertParallel, ::testing::Values(1, 2, 4));

TEST(DistributeExpertsTest, ARankCountThatDoesNotDivideTheExpertsIsRefused) {
  run_local_ranks(3, [](const std::shared_ptr<Communicator>& comm) {
    nn::MixtureOfExperts mixture(options(), {.without_memory = true});
    EXPECT_THAT(error_text<ConfigError>([&] { distribute_experts(mixture, comm); }),
                AllOf(HasSubstr("8 experts"), HasSubstr("3 ranks"), HasSubstr("divides")));
  });
}

}  // namespace
}  // namespace phalanx::expert_parallel_test
