// Each pair against its closed form, and its gradient against the adjoint: sum over ranks of <f(x), g> equals the sum
// of <x, backward(g)>, for values that differ by rank.
#include "phalanx/parallel/tensor/functional_collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/parallel/tensor/layout.h"

namespace phalanx {
namespace {

using Group = std::shared_ptr<Communicator>;
using Function = std::function<at::Tensor(const at::Tensor&, std::int64_t, const Group&)>;

struct Pair {
  std::string name;
  Function run;
  bool shared_in, shared_out;  // whether the values are the same on all ranks
};

at::Tensor plain_all_gather(const at::Tensor& x, std::int64_t dim, const Group& group) {
  return all_gather_along(x, dim, group);
}

std::vector<Pair> pairs() {
  const Function copy = [](const at::Tensor& x, std::int64_t, const Group& g) { return copy_to_group(x, g); };
  const Function sum = [](const at::Tensor& x, std::int64_t, const Group& g) { return reduce_from_group(x, g); };
  return {{"copy", copy, true, true},
          {"sum", sum, false, true},
          {"gather", gather_from_group, false, true},
          {"part", scatter_to_group, true, false},
          {"all_gather", plain_all_gather, false, true},
          {"reduce_scatter", reduce_scatter_along, false, false}};
}

at::Tensor values(double phase) {  // [4, 8, 4]
  return at::sin(at::arange(4 * 8 * 4, at::kDouble).mul(0.37).add(phase)).view({4, 8, 4});
}

class FunctionalCollectives : public ::testing::TestWithParam<int> {};

TEST_P(FunctionalCollectives, ForwardIsTheClosedForm) {
  const int ranks = GetParam();
  run_local_ranks(ranks, [&](const Group& comm) {
    for (const std::int64_t dim : {0, 1, 2, -1, -2}) {
      SCOPED_TRACE(fmt::format("{} ranks, dim {}", ranks, dim));
      std::vector<at::Tensor> all;
      at::Tensor sum = at::zeros({4, 8, 4}, at::kDouble);
      for (int r = 0; r < ranks; ++r) {
        all.push_back(values(r));
        sum = sum + all.back();
      }
      const at::Tensor& x = all[static_cast<std::size_t>(comm->rank())];
      const std::int64_t part = x.size(dim) / ranks, first = comm->rank() * part;
      EXPECT_TRUE(at::equal(copy_to_group(x, comm), x));
      EXPECT_TRUE(at::equal(reduce_from_group(x, comm), sum));
      EXPECT_TRUE(at::equal(gather_from_group(x, dim, comm), at::cat(all, dim)));
      EXPECT_TRUE(
          at::equal(all_gather_along(x.transpose(0, 1).contiguous().transpose(0, 1), dim, comm), at::cat(all, dim)));
      EXPECT_TRUE(at::equal(scatter_to_group(x, dim, comm), x.narrow(dim, first, part)));
      EXPECT_TRUE(at::equal(reduce_scatter_along(x, dim, comm), sum.narrow(dim, first, part)));
      EXPECT_TRUE(at::equal(x, values(comm->rank())));  // inputs are unchanged
    }
  });
}

TEST_P(FunctionalCollectives, BackwardIsTheMirroredFunction) {
  const int ranks = GetParam();
  run_local_ranks(ranks, [&](const Group& comm) {
    for (const Pair& pair : pairs()) {
      for (const std::int64_t dim : {0, 1, -1}) {
        SCOPED_TRACE(fmt::format("{} of {} ranks, dim {}", pair.name, ranks, dim));
        const at::Tensor x = values(comm->rank()).requires_grad_();
        const at::Tensor y = pair.run(x, dim, comm);
        const at::Tensor g = at::sin(at::arange(y.numel(), at::kDouble).mul(0.7 + comm->rank())).view(y.sizes());
        const at::Tensor before = g.clone();
        y.backward(g);
        EXPECT_TRUE(at::equal(g, before));
        const auto by_name = [&]() -> at::Tensor {
          if (pair.name == "copy") return reduce_from_group(g, comm);
          if (pair.name == "sum") return g;
          if (pair.name == "gather") return scatter_to_group(g, dim, comm);
          if (pair.name == "part") return gather_from_group(g, dim, comm);
          return pair.name == "all_gather" ? reduce_scatter_along(g, dim, comm) : all_gather_along(g, dim, comm);
        };
        EXPECT_TRUE(at::equal(x.grad(), by_name()));
      }
    }
  });
}

// The two pairs that are linear maps of all ranks' values together: <A x, g> = <x, A^T g>.
TEST_P(FunctionalCollectives, GatherAndReduceScatterAreAdjoint) {
  run_local_ranks(GetParam(), [&](const Group& comm) {
    for (const auto& run : {Function(plain_all_gather), Function(reduce_scatter_along)}) {
      const at::Tensor x = values(comm->rank()).requires_grad_();
      const at::Tensor y = run(x, 1, comm);
      const at::Tensor g = at::sin(at::arange(y.numel(), at::kDouble).mul(1.1 + comm->rank())).view(y.sizes());
      y.backward(g);
      const at::Tensor left = (y.detach() * g).sum(), right = (x.detach() * x.grad()).sum();
      comm->all_reduce(left);
      comm->all_reduce(right);
      EXPECT_NEAR(left.item<double>(), right.item<double>(), 1e-12 * (1 + std::abs(left.item<double>())));
    }
  });
}

TEST_P(FunctionalCollectives, BackwardOfBackward) {
  run_local_ranks(GetParam(), [&](const Group& comm) {
    const at::Tensor x = values(0.0).requires_grad_();
    // y = sum_r (r + 1) x^2 if each rank uses a shared x: dy/dx = 2 x n (n + 1) / 2, and the second derivative is that
    // without x.
    const at::Tensor y = copy_to_group(x, comm).square().mul(comm->rank() + 1).sum();
    const at::Tensor dx = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    const double total = comm->size() * (comm->size() + 1.0) / 2;
    EXPECT_TRUE(at::allclose(dx, x * (2 * total)));
    EXPECT_TRUE(at::allclose(torch::autograd::grad({dx.sum()}, {x})[0], at::ones_like(x) * (2 * total)));
  });
}
INSTANTIATE_TEST_SUITE_P(Worlds, FunctionalCollectives, ::testing::Values(1, 2, 4));

TEST(FunctionalCollectiveErrors, ADimensionThatTheRanksDoNotDivide) {
  run_local_ranks(2, [](const Group& comm) {
    try {
      reduce_scatter_along(at::zeros({3, 7}), 1, comm);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("dimension 1 of [3, 7]"));
      EXPECT_THAT(error.what(), HasSubstr("7 % 2 = 1"));
      EXPECT_THAT(error.what(), HasSubstr("6 or 8"));
    }
    EXPECT_THROW(all_gather_along(at::zeros({3}), 1, comm), Error);
  });
}

// Rank r sends r + j rows to rank j; their gradients go back.
TEST(AllToAllRows, RowsAndGradientsReachTheirRanks) {
  run_local_ranks(3, [](const Group& comm) {
    const int rank = comm->rank();
    std::vector<std::int64_t> sent, received;
    std::vector<at::Tensor> rows, expected;
    for (int other = 0; other < 3; ++other) {
      sent.push_back(rank + other);
      received.push_back(other + rank);
      rows.push_back(at::ones({rank + other, 2}, at::kDouble) * (10 * rank + other));
      expected.push_back(at::ones({other + rank, 2}, at::kDouble) * (10 * other + rank));
    }
    const at::Tensor x = at::cat(rows).requires_grad_();
    const at::Tensor y = all_to_all_rows(x, sent, received, comm);
    EXPECT_TRUE(at::equal(y, at::cat(expected)));
    y.backward(at::cat(expected) * 3);
    EXPECT_TRUE(at::equal(x.grad(), x * 3));
    EXPECT_THROW(all_to_all_rows(x.slice(0, 1), sent, received, comm), Error);
  });
}

TEST(Layouts, EveryConversionOfTheTableAndNoOther) {
  const std::vector<ActivationLayout> all = {ActivationLayout::replicated(), ActivationLayout::shared(),
                                             ActivationLayout::partial(), ActivationLayout::split(1)};
  int allowed = 0;
  for (const auto& from : all) {
    for (const auto& to : all) {
      try {
        check_conversion("here", from, to);
        ++allowed;
      } catch (const ConfigError& error) {
        EXPECT_THAT(error.what(), HasSubstr("here: nothing turns " + from.text() + " into " + to.text()));
      }
    }
  }
  EXPECT_EQ(allowed, 4 + 7);
  EXPECT_THROW(check_conversion("here", ActivationLayout::split(0), ActivationLayout::split(1)), ConfigError);
  run_local_ranks(2, [](const Group& comm) {
    const at::Tensor x = at::ones({2, 2}).requires_grad_();
    const at::Tensor y = convert(x, ActivationLayout::partial(), ActivationLayout::shared(), comm);
    EXPECT_TRUE(at::equal(y, at::ones({2, 2}) * 2));
    y.backward(at::ones({2, 2}) * (comm->rank() + 1));
    EXPECT_TRUE(at::equal(x.grad(), at::ones({2, 2}) * 3));
  });
}

}  // namespace
}  // namespace phalanx
