#include "phalanx/infer/work_stealing_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <thread>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/store/hash_store.h"

namespace phalanx::infer {
namespace {

std::vector<std::size_t> numbers(std::size_t count) {
  std::vector<std::size_t> items(count);
  std::iota(items.begin(), items.end(), 100);
  return items;
}

TEST(WorkStealingQueue, SharesAreContiguousAndBalanced) {
  for (const std::size_t items : {0, 1, 7, 8, 9}) {
    std::size_t end = 0;
    for (int member = 0; member < 4; ++member) {
      const auto [first, next] = WorkStealingQueue::share_of(items, member, 4);
      EXPECT_EQ(first, end);
      EXPECT_LE(next - first, items / 4 + 1);
      EXPECT_GE(next - first, items / 4);
      end = next;
    }
    EXPECT_EQ(end, items);
  }
}

TEST(WorkStealingQueue, WhoIsThroughTakesFromTheShareInWhichMostIsLeft) {
  HashStore store;
  WorkStealingQueue a(store, "job", 0, 3, numbers(12)), b(store, "job", 1, 3, numbers(12)),
      c(store, "job", 2, 3, numbers(12));
  EXPECT_THAT(a.claim(3), ElementsAre(100, 101, 102));
  EXPECT_THAT(b.claim(1), ElementsAre(104));
  EXPECT_THAT(a.claim(3), ElementsAre(103));       // what is left of its own
  EXPECT_THAT(a.claim(3), ElementsAre(108, 109));  // half of c's four
  EXPECT_THAT(c.claim(8), ElementsAre(110, 111));
  EXPECT_THAT(c.claim(1), ElementsAre(105));  // of b's three
  EXPECT_THAT(b.claim(9), ElementsAre(106, 107));
  for (WorkStealingQueue* share : {&a, &b, &c}) EXPECT_TRUE(share->claim(2).empty());
  WorkStealingQueue other(store, "other job", 0, 1, numbers(1));
  EXPECT_THAT(other.claim(2), ElementsAre(100));
}

TEST(WorkStealingQueue, EveryItemGoesToOneMemberHoweverTheyRace) {
  HashStore store;
  std::mutex mutex;
  std::vector<std::size_t> claimed;
  std::vector<std::thread> members;
  for (int member = 0; member < 4; ++member) {
    members.emplace_back([&, member] {
      WorkStealingQueue share(store, "job", member, 4, numbers(1001));
      for (auto mine = share.claim(1 + member); !mine.empty(); mine = share.claim(1 + member)) {
        const std::lock_guard lock(mutex);
        claimed.insert(claimed.end(), mine.begin(), mine.end());
      }
    });
  }
  for (auto& member : members) member.join();
  std::ranges::sort(claimed);
  EXPECT_EQ(claimed, numbers(1001));
}

}  // namespace
}  // namespace phalanx::infer
