// Which piece is where in ring attention: checked against the positions that see each other.
#include "phalanx/parallel/context/ring_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "phalanx/base/testing/matchers.h"

namespace phalanx::ring_schedule_test {
namespace {

using Way = RingSchedule::Way;

constexpr std::int64_t kSeq = 48;

/// Whether a query of one range sees a key of another one, in any row.
bool sees(const PositionRange& queries, const PositionRange& keys, std::int64_t window,
          const DocumentBoundaries* documents) {
  for (std::int64_t row = 0; row < (documents != nullptr ? documents->rows() : 1); ++row) {
    for (std::int64_t q = queries.first; q < queries.first + queries.count; ++q) {
      for (std::int64_t k = keys.first; k < keys.first + keys.count && k <= q; ++k) {
        if (window > 0 && q - k >= window) continue;
        if (documents == nullptr) return true;
        const auto ends = documents->of_row(row);
        const auto document_of = [&](std::int64_t position) {
          return std::ranges::upper_bound(ends, row * kSeq + position) - ends.begin();
        };
        if (document_of(q) == document_of(k)) return true;
      }
    }
  }
  return false;
}

/// Follows every piece, and returns how many transfers there are.
std::int64_t check(std::int64_t ranks, std::int64_t window, const DocumentBoundaries* documents) {
  SCOPED_TRACE(testing::Message() << ranks << " ranks, window " << window << (documents ? ", documents" : ""));
  const ContextCut cut{.ranks = ranks};
  const RingSchedule ring(cut, kSeq, window, documents);
  std::int64_t transfers = 0;
  for (const Way way : RingSchedule::kWays) {
    for (std::int64_t owner = 0; owner < ranks; ++owner) {
      std::set<std::int64_t> reached;
      std::int64_t rank = owner, needed_last = 0;
      for (std::int64_t hop = 0; hop <= ring.last_hop(way, owner); ++hop) {
        EXPECT_EQ(ring.rank_at(way, owner, hop), rank);
        EXPECT_EQ(ring.owner_at(way, rank, hop), owner);
        reached.insert(rank);
        if (!ring.queries(way, owner, rank).empty()) needed_last = hop;
        EXPECT_EQ(ring.previous(way, ring.next(way, rank)), rank);
        rank = ring.next(way, rank);
      }
      EXPECT_EQ(needed_last, ring.last_hop(way, owner));  // it goes no further than it must
      EXPECT_LE(ring.last_hop(way, owner), ring.hops());
      transfers += ring.last_hop(way, owner);
      for (std::int64_t other = 0; other < ranks; ++other) {
        std::vector<PositionRange> expected;
        for (const PositionRange& range : cut.ranges_of(other, kSeq)) {
          if (sees(range, ring.keys(way, owner), window, documents)) expected.push_back(range);
        }
        EXPECT_EQ(ring.queries(way, owner, other), expected);
        EXPECT_TRUE(expected.empty() || reached.contains(other)) << owner << " does not come to " << other;
      }
    }
  }
  return transfers;
}

TEST(RingSchedule, BringsEachPieceToTheRanksWhoseQueriesSeeIt) {
  const DocumentBoundaries documents(kSeq, {0, 5, 6, 12, 40, 48, 48 + 24, 96});
  for (const std::int64_t ranks : {1, 2, 3, 4, 6, 8}) {
    for (const std::int64_t window : {0, 1, 2, 7, 20, 47}) {
      for (const DocumentBoundaries* const one : {static_cast<const DocumentBoundaries*>(nullptr), &documents}) {
        check(ranks, window, one);
      }
    }
  }
}

TEST(RingSchedule, SendsNoMoreThanIsSeen) {
  // Heads go round, tails only to the ranks below.
  EXPECT_EQ(check(4, 0, nullptr), 4 * 3 + (0 + 1 + 2 + 3));
  // A window of one piece: each piece is seen by the next one, which is the same rank's in the middle.
  EXPECT_EQ(check(4, 6, nullptr), 3 + 3);
  // A query sees its own key alone.
  EXPECT_EQ(check(4, 1, nullptr), 0);
  // Documents that end where pieces do.
  const DocumentBoundaries documents(kSeq, {0, 6, 12, 18, 24, 30, 36, 42, 48});
  EXPECT_EQ(check(4, 0, &documents), 0);
}

TEST(RingSchedule, HasThePicture) {
  const RingSchedule ring({.ranks = 4}, kSeq, 0, nullptr);
  const auto owners = [&](Way way, std::int64_t hop) {
    std::vector<std::int64_t> all;
    for (std::int64_t rank = 0; rank < 4; ++rank) all.push_back(ring.owner_at(way, rank, hop).value_or(-1));
    return all;
  };
  EXPECT_THAT(owners(RingSchedule::up, 1), ElementsAre(3, 0, 1, 2));
  EXPECT_THAT(owners(RingSchedule::down, 1), ElementsAre(1, 2, 3, -1));
  EXPECT_THAT(owners(RingSchedule::up, 2), ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(owners(RingSchedule::down, 2), ElementsAre(2, 3, -1, -1));
  EXPECT_EQ(ring.hops(), 3);
}

}  // namespace
}  // namespace phalanx::ring_schedule_test
