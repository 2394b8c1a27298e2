// Attention over sequences that are cut over ranks, against one rank with whole sequences: values, and the gradients of
// queries, keys and values.
#include "phalanx/parallel/context/context_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/kernels/causal_attention.h"
#include "phalanx/layout/packed_cut.h"
#include "phalanx/parallel/context/packed_positions.h"

namespace phalanx::context_attention_test {
namespace {

using Tensors = std::vector<at::Tensor>;
using Documents = std::shared_ptr<const DocumentBoundaries>;

constexpr std::int64_t kSeq = 48;
constexpr ContextExchange kExchanges[] = {ContextExchange::keys, ContextExchange::heads, ContextExchange::ring};

/// This rank's positions of x [rows, heads, seq, head_dim].
at::Tensor at_ranges(const at::Tensor& x, const ContextCut& cut, const Documents& documents = nullptr) {
  Tensors rows;
  for (std::int64_t row = 0; row < x.size(0); ++row) {
    Tensors parts;
    const auto add = [&](const auto& ranges) {
      for (const auto& [first, count] : ranges) parts.push_back(x.narrow(0, row, 1).narrow(2, first, count));
    };
    documents ? add(packed_ranges(cut, documents->of_row(row))[static_cast<std::size_t>(cut.rank)])
              : add(cut.ranges(x.size(2)));
    rows.push_back(at::cat(parts, 2));
  }
  return at::cat(rows, 0);
}

at::Tensor direction_like(const at::Tensor& y) {
  return at::arange(y.numel(), at::TensorOptions(at::kDouble)).mul(0.7).add(0.5).sin().view(y.sizes());
}

struct Case {
  ContextExchange exchange = ContextExchange::keys;
  int ranks = 2;
  std::int64_t heads = 8, kv_heads = 4;
  std::int64_t window = 0;
  Documents documents;
  bool sinks = false;
  at::ScalarType type = at::kFloat;
  double tolerance = 1e-5;
  bool by_work = false;
};

void expect_one_ranks_numbers(const Case& c) {
  static const char* const kNames[] = {"keys", "heads", "ring"};
  SCOPED_TRACE(testing::Message() << kNames[static_cast<std::size_t>(c.exchange)] << ", " << c.ranks << " ranks, "
                                  << c.heads << "/" << c.kv_heads << " heads, window " << c.window
                                  << (c.documents ? ", documents" : "") << (c.by_work ? ", cut by work" : "")
                                  << (c.sinks ? ", sinks" : "") << ", " << c10::toString(c.type));
  at::manual_seed(3);
  Tensors inputs;
  for (const std::int64_t heads : {c.heads, c.kv_heads, c.kv_heads}) {
    inputs.push_back(at::randn({2, heads, kSeq, 8}).to(c.type));
  }
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.to(at::kDouble).clone().requires_grad_());
  at::Tensor sinks, own_sinks;  // own_sinks: of the reference
  if (c.sinks) {
    sinks = at::randn({c.heads}).to(c.type);
    own_sinks = sinks.to(at::kDouble).requires_grad_();
  }
  const at::Tensor expected =
      kernels::causal_attention_reference(leaves[0], leaves[1], leaves[2], c.window, c.documents.get(), own_sinks);
  const at::Tensor direction = direction_like(expected);
  expected.backward(direction);

  run_local_ranks(c.ranks, [&](const std::shared_ptr<Communicator>& world) {
    const ContextCut cut{
        .ranks = world->size(), .rank = world->rank(), .by_work = c.by_work, .window = c.by_work ? c.window : 0};
    const auto attention = make_context_attention(c.exchange, world, cut);
    Tensors mine;
    for (const at::Tensor& input : inputs) mine.push_back(at_ranges(input, cut, c.documents).requires_grad_());
    const at::Tensor my_sinks = c.sinks ? sinks.detach().clone().requires_grad_() : at::Tensor();
    const at::Tensor y =
        attention->attend(mine[0], mine[1], mine[2], {.window = c.window, .documents = c.documents, .sinks = my_sinks});
    y.backward(at_ranges(direction, cut, c.documents).to(c.type));
    const auto expect_close = [&](const at::Tensor& found, const at::Tensor& whole, const char* what) {
      const at::Tensor part = at_ranges(whole.detach(), cut, c.documents);
      EXPECT_EQ(found.scalar_type(), c.type);
      EXPECT_LE((found.to(at::kDouble) - part).norm().item<double>(), c.tolerance * part.norm().item<double>())
          << what << " on rank " << world->rank();
    };
    expect_close(y.detach(), expected, "the result");
    expect_close(mine[0].grad(), leaves[0].grad(), "the gradient of queries");
    expect_close(mine[1].grad(), leaves[1].grad(), "the gradient of keys");
    expect_close(mine[2].grad(), leaves[2].grad(), "the gradient of values");
    if (!c.sinks) return;
    const at::Tensor sum = my_sinks.grad().to(at::kDouble);  // each rank has an addend
    world->all_reduce(sum);
    EXPECT_LE((sum - own_sinks.grad()).norm().item<double>(), c.tolerance * own_sinks.grad().norm().item<double>());
  });
}

const Documents& documents() {
  // Some end within a rank's piece, some at its end, and one spans several ranks' pieces.
  static const auto all =
      std::make_shared<const DocumentBoundaries>(kSeq, std::vector<std::int32_t>{0, 5, 6, 12, 40, 48, 48 + 24, 96});
  return all;
}

TEST(ContextAttention, HasOneRanksNumbers) {
  for (const ContextExchange exchange : kExchanges) {
    for (const int ranks : {1, 2, 4, 8}) {
      for (const std::int64_t window : {0, 2, 7, 20}) {
        for (const Documents& rows : {Documents(), documents()}) {
          expect_one_ranks_numbers({.exchange = exchange, .ranks = ranks, .window = window, .documents = rows});
        }
      }
    }
  }
}

TEST(ContextAttention, HasOneRanksNumbersWithRowsThatAreCutByWork) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const auto& [type, tolerance] :
         {std::pair(at::kFloat, 1e-5), std::pair(at::kDouble, 1e-12), std::pair(at::kBFloat16, 2e-2)}) {
      for (const std::int64_t window : {0, 2, 20}) {
        for (const bool sinks : {false, true}) {
          expect_one_ranks_numbers({.ranks = ranks,
                                    .kv_heads = 2,
                                    .window = window,
                                    .documents = documents(),
                                    .sinks = sinks,
                                    .type = type,
                                    .tolerance = tolerance,
                                    .by_work = true});
        }
      }
    }
  }
}

// One attention, whose batches have other documents, and none.
TEST(ContextAttention, EachBatchIsCutByItsOwnDocuments) {
  const auto other = std::make_shared<const DocumentBoundaries>(kSeq, std::vector<std::int32_t>{0, 40, 48, 50, 96});
  at::manual_seed(3);
  const at::Tensor x = at::randn({2, 4, kSeq, 8});
  run_local_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
    const ContextCut cut{.ranks = 4, .rank = world->rank(), .by_work = true};
    const auto attention = make_context_attention(ContextExchange::keys, world, cut);
    for (const Documents& of_batch : {documents(), Documents(other), Documents(), documents()}) {
      const at::Tensor mine = at_ranges(x, cut, of_batch);
      const at::Tensor expected =
          at_ranges(kernels::causal_attention_reference(x, x, x, 0, of_batch.get()), cut, of_batch);
      EXPECT_TRUE(attention->attend(mine, mine, mine, {.documents = of_batch}).allclose(expected, 1e-5, 1e-5));
    }
  });
}

TEST(ContextAttention, RefusesACutByWorkThatItCannotTake) {
  for (const ContextExchange exchange : {ContextExchange::heads, ContextExchange::ring}) {
    EXPECT_THAT(error_text<Error>([&] {
                  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
                    make_context_attention(exchange, world, {.ranks = 2, .rank = world->rank(), .by_work = true});
                  });
                }),
                HasSubstr("rows that are cut by work, and an exchange of"));
  }
  const DocumentBoundaries odd(30, {0, 30});
  EXPECT_THAT(error_text<Error>([&] { PackedPositions({.ranks = 4, .by_work = true}, odd); }),
              HasSubstr("rows of 30 tokens over 4 ranks; expected rows that are padded to 32"));
}

TEST(ContextAttention, HasOneRanksNumbersWithFewerKeyHeadsThanRanks) {
  for (const ContextExchange exchange : kExchanges) {
    for (const std::int64_t kv_heads : {1, 2, 8}) {
      expect_one_ranks_numbers({.exchange = exchange, .ranks = 4, .kv_heads = kv_heads});
      expect_one_ranks_numbers({.exchange = exchange, .ranks = 8, .kv_heads = kv_heads, .documents = documents()});
    }
  }
  for (const ContextExchange exchange : {ContextExchange::keys, ContextExchange::ring}) {
    for (const Documents& rows : {Documents(), documents()}) {
      for (const std::int64_t window : {0, 7, 20}) {
        expect_one_ranks_numbers(
            {.exchange = exchange, .ranks = 3, .heads = 4, .kv_heads = 2, .window = window, .documents = rows});
      }
    }
  }
}

TEST(ContextAttention, HasOneRanksNumbersInOtherTypes) {
  for (const ContextExchange exchange : kExchanges) {
    for (const Documents& rows : {Documents(), documents()}) {
      for (const auto& [type, tolerance] : {std::pair(at::kDouble, 1e-12), std::pair(at::kBFloat16, 2e-2)}) {
        for (const std::int64_t window : {0, 7, 20}) {
          expect_one_ranks_numbers({.exchange = exchange,
                                    .ranks = 4,
                                    .kv_heads = 2,
                                    .window = window,
                                    .documents = rows,
                                    .type = type,
                                    .tolerance = tolerance});
        }
      }
    }
  }
}

TEST(ContextAttention, HasOneRanksNumbersWithSinks) {
  for (const ContextExchange exchange : kExchanges) {
    for (const Documents& rows : {Documents(), documents()}) {
      for (const std::int64_t window : {0, 7}) {
        for (const auto& [type, tolerance] : {std::pair(at::kFloat, 2e-6), std::pair(at::kBFloat16, 2e-2)}) {
          expect_one_ranks_numbers({.exchange = exchange,
                                    .ranks = 4,
                                    .kv_heads = 2,
                                    .window = window,
                                    .documents = rows,
                                    .sinks = true,
                                    .type = type,
                                    .tolerance = tolerance});
        }
      }
    }
    EXPECT_THAT(error_text<Error>([&] {
                  run_local_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
                    const auto attention = make_context_attention(exchange, world, {.ranks = 2, .rank = world->rank()});
                    const at::Tensor x = at::randn({1, 4, 4, 8});
                    attention->attend(x, x, x, {.sinks = at::randn({2})});
                  });
                }),
                HasSubstr("2 sinks for 4 query heads; expected one for each"));
  }
}

TEST(ContextAttention, RefusesHeadsThatCannotBeDealtOut) {
  const std::string refusal = error_text<Error>([] {
    run_local_ranks(2, [](const std::shared_ptr<Communicator>& world) {
      const auto attention = make_context_attention(ContextExchange::heads, world, {.ranks = 2, .rank = world->rank()});
      const at::Tensor x = at::randn({1, 3, 4, 8});
      attention->attend(x, x, x, {});
    });
  });
  EXPECT_THAT(refusal, HasSubstr("3 heads and 3 key heads cannot be dealt out to 2 ranks"));
}

}  // namespace
}  // namespace phalanx::context_attention_test
