#include "phalanx/layout/context_cut.h"

#include <gtest/gtest.h>

#include <vector>

namespace phalanx::context_cut_test {
namespace {

TEST(ContextCut, EveryPositionHasOneRank) {
  for (const std::int64_t ranks : {1, 2, 3, 4, 8}) {
    for (const std::int64_t multiple : {2, 4, 6}) {
      for (const std::int64_t seq_len : {1, 15, 16, 30, 96}) {
        const ContextCut cut{.ranks = ranks, .multiple = multiple};
        const std::int64_t padded = cut.padded(seq_len);
        EXPECT_GE(padded, seq_len);
        EXPECT_LT(padded, seq_len + ranks * multiple);
        EXPECT_EQ(cut.local(seq_len) % multiple, 0);
        std::vector<int> seen(static_cast<std::size_t>(padded));
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          std::int64_t count = 0;
          for (const auto& [first, n] : cut.ranges_of(rank, seq_len)) {
            for (std::int64_t p = first; p < first + n; ++p) ++seen.at(static_cast<std::size_t>(p));
            count += n;
          }
          EXPECT_EQ(count, cut.local(seq_len));
        }
        for (const int times : seen) EXPECT_EQ(times, 1);
      }
    }
  }
}

TEST(ContextCut, EveryRankSeesAsManyKeys) {
  const ContextCut cut{.ranks = 4};
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    std::int64_t pairs = 0;
    for (const auto& [first, n] : cut.ranges_of(rank, 64)) {
      for (std::int64_t p = first; p < first + n; ++p) pairs += p + 1;
    }
    EXPECT_EQ(pairs, 64 * 65 / 2 / 4);
  }
}

TEST(ContextCut, HeadAndTail) {
  const ContextCut cut{.ranks = 4, .rank = 1};
  EXPECT_EQ(cut.padded(30), 32);
  EXPECT_EQ(cut.ranges(30), (std::array<PositionRange, 2>{PositionRange{4, 4}, PositionRange{24, 4}}));
}

}  // namespace
}  // namespace phalanx::context_cut_test
