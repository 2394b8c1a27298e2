#include "phalanx/layout/packed_cut.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace phalanx::packed_cut_test {
namespace {

using Ends = std::vector<std::int32_t>;

/// By position of the padded row, its rank; -1 where it has none, -2 where several have it.
std::vector<std::int64_t> owners(const ContextCut& cut, const Ends& ends) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(cut.padded(ends.back() - ends.front())), -1);
  const auto ranges = packed_ranges(cut, ends);
  for (std::size_t rank = 0; rank < ranges.size(); ++rank) {
    for (const auto& [first, count] : ranges[rank]) {
      for (std::int64_t p = first; p < first + count; ++p) {
        std::int64_t& owner = all.at(static_cast<std::size_t>(p));
        owner = owner == -1 ? static_cast<std::int64_t>(rank) : -2;
      }
    }
  }
  return all;
}

std::vector<std::int64_t> works(const ContextCut& cut, const Ends& ends) {
  std::vector<std::int64_t> all;
  for (const auto& ranges : packed_ranges(cut, ends)) all.push_back(seen_keys(ranges, ends, cut.window));
  return all;
}

double worst_by_mean(const std::vector<std::int64_t>& work) {
  const auto sum = static_cast<double>(std::accumulate(work.begin(), work.end(), std::int64_t{0}));
  return static_cast<double>(std::ranges::max(work)) * static_cast<double>(work.size()) / sum;
}

/// A row of documents whose lengths differ widely.
Ends random_row(std::mt19937& random, std::int32_t begin, std::int32_t seq_len, std::int32_t longest) {
  Ends ends = {begin};
  while (ends.back() < begin + seq_len) {
    const auto length = static_cast<std::int32_t>(1 + random() % (1 + random() % static_cast<unsigned>(longest)));
    ends.push_back(std::min(ends.back() + length, begin + seq_len));
  }
  return ends;
}

TEST(PackedCut, EveryPositionHasOneRankAndEveryRankAsManyPositions) {
  std::mt19937 random(3);
  for (const std::int64_t ranks : {1, 2, 3, 4, 8}) {
    for (const std::int64_t multiple : {2, 6}) {
      for (const std::int32_t seq_len : {1, 15, 30, 96, 217, 1000}) {
        for (const bool by_work : {false, true}) {
          const Ends ends = random_row(random, 0, seq_len, 40);
          const ContextCut cut{.ranks = ranks, .multiple = multiple, .by_work = by_work};
          const auto all = owners(cut, ends);
          EXPECT_THAT(all, testing::Each(testing::Ge(0)));
          for (std::int64_t rank = 0; rank < ranks; ++rank) {
            EXPECT_EQ(std::ranges::count(all, rank), cut.local(seq_len)) << rank << " of " << ranks;
          }
          for (const auto& ranges : packed_ranges(cut, ends)) {
            std::int64_t end = 0;
            for (const auto& [first, count] : ranges) {
              EXPECT_GE(first, end);
              EXPECT_GT(count, 0);
              end = first + count;
            }
          }
        }
      }
    }
  }
}

TEST(PackedCut, TheExampleOfTheHeader) {
  const ContextCut cut{.ranks = 4, .by_work = true};
  EXPECT_THAT(owners(cut, {0, 10, 16}), testing::ElementsAre(0, 2, 2, 3, 1, 3, 3, 2, 1, 0, 1, 3, 0, 1, 0, 2));
  EXPECT_THAT(works(cut, {0, 10, 16}), testing::Each(19));
}

// 68 of 136 positions: eight blocks of eight, and one of four.
TEST(PackedCut, ShortBlocksAreTheLastOfTheRow) {
  const ContextCut cut{.ranks = 2, .by_work = true};
  const auto all = owners(cut, {0, 136});
  for (std::size_t block = 0; block < 16; ++block) {
    for (std::size_t p = 0; p < 8; ++p) EXPECT_EQ(all[8 * block + p], all[8 * block]) << block;
  }
  EXPECT_NE(all[128], all[132]);
  for (std::size_t p = 1; p < 4; ++p) {
    EXPECT_EQ(all[128 + p], all[128]);
    EXPECT_EQ(all[132 + p], all[132]);
  }
}

TEST(PackedCut, DependsOnTheRowAlone) {
  const ContextCut cut{.ranks = 4, .by_work = true};
  EXPECT_EQ(owners(cut, {64, 70, 99, 128}), owners(cut, {0, 6, 35, 64}));
}

TEST(PackedCut, PaddingIsADocument) {
  const ContextCut cut{.ranks = 4, .by_work = true};
  EXPECT_EQ(owners(cut, {0, 7, 29}), owners(cut, {0, 7, 29, 32}));
  EXPECT_EQ(works(cut, {0, 7, 29}), works(cut, {0, 7, 29, 32}));
}

TEST(PackedCut, SeenKeys) {
  const Ends ends = {100, 104, 110};
  const std::vector<PositionRange> all = {{0, 10}}, some = {{2, 3}, {8, 1}}, padding = {{9, 3}};
  EXPECT_EQ(seen_keys(all, ends, 0), 10 + 21);
  EXPECT_EQ(seen_keys(some, ends, 0), 3 + 4 + 1 + 5);
  EXPECT_EQ(seen_keys(padding, ends, 0), 6 + 1 + 2);
  EXPECT_EQ(seen_keys(all, ends, 3), (1 + 2 + 3 + 3) + (1 + 2 + 3 + 3 + 3 + 3));
  EXPECT_EQ(seen_keys(some, ends, 1), 4);
}

TEST(PackedCut, BalancesWork) {
  std::mt19937 random(5);
  double worst = 0, sum = 0, worst_of_head_and_tail = 0;
  for (const std::int64_t ranks : {2, 4, 8}) {
    for (const std::int64_t window : {0, 512}) {
      for (int row = 0; row < 20; ++row) {
        const Ends ends = random_row(random, 0, 8192, 6000);
        ContextCut cut{.ranks = ranks, .by_work = true, .window = window};
        const double ratio = worst_by_mean(works(cut, ends));
        worst = std::max(worst, ratio);
        sum += ratio;
        cut.by_work = false;
        worst_of_head_and_tail = std::max(worst_of_head_and_tail, worst_by_mean(works(cut, ends)));
      }
    }
  }
  EXPECT_LT(worst, 1.06);
  EXPECT_LT(sum / (3 * 2 * 20), 1.01);
  EXPECT_GT(worst_of_head_and_tail, 1.5);
}

}  // namespace
}  // namespace phalanx::packed_cut_test
