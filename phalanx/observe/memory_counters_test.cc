#include "phalanx/observe/memory_counters.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace phalanx::observe {
namespace {

using Category = MemoryCategory;

// The counters belong to the process, and other tests of this program may have left values.
class MemoryCountersTest : public ::testing::Test {
 protected:
  std::int64_t taken(Category category) const { return memory_allocated()[category] - before_[category]; }
  MemoryCounts before_ = memory_allocated();
};

TEST_F(MemoryCountersTest, CountByCategory) {
  record_memory_allocated(Category::parameters, 100);
  record_memory_allocated(Category::optimizer, 200);
  record_memory_allocated(Category::buffers, 30, /*shared=*/true);
  EXPECT_EQ(taken(Category::parameters), 100);
  EXPECT_EQ(taken(Category::optimizer), 200);
  EXPECT_EQ(taken(Category::buffers), 30);
  EXPECT_EQ(taken(Category::activations), 0);
  EXPECT_EQ(memory_allocated().total() - before_.total(), 330);
  EXPECT_EQ(memory_allocated().state() - before_.state(), 300);
  EXPECT_EQ(memory_allocated().shared - before_.shared, 30);
  record_memory_freed(Category::parameters, 100);
  record_memory_freed(Category::optimizer, 200);
  record_memory_freed(Category::buffers, 30, /*shared=*/true);
  EXPECT_EQ(memory_allocated().total(), before_.total());
  EXPECT_EQ(memory_allocated().shared, before_.shared);
}

TEST_F(MemoryCountersTest, ThePeakIsWhatWasThereTogether) {
  reset_peak_memory_stats();
  EXPECT_EQ(max_memory_allocated().total(), before_.total());
  record_memory_allocated(Category::activations, 1000);
  record_memory_freed(Category::activations, 1000);
  record_memory_allocated(Category::gradients, 600);
  record_memory_allocated(Category::buffers, 600);
  record_memory_freed(Category::buffers, 600);
  record_memory_allocated(Category::optimizer, 500);
  const MemoryCounts peak = max_memory_allocated();
  EXPECT_EQ(peak.total() - before_.total(), 1200);
  EXPECT_EQ(peak[Category::activations], before_[Category::activations]);
  EXPECT_EQ(peak[Category::gradients] - before_[Category::gradients], 600);
  EXPECT_EQ(peak[Category::buffers] - before_[Category::buffers], 600);
  EXPECT_EQ(peak[Category::optimizer], before_[Category::optimizer]);
  record_memory_freed(Category::gradients, 600);
  record_memory_freed(Category::optimizer, 500);
  reset_peak_memory_stats();
  EXPECT_EQ(max_memory_allocated().total(), before_.total());
}

TEST_F(MemoryCountersTest, ScopesNestAndBelongToTheirThread) {
  EXPECT_EQ(MemoryScope::current(), Category::activations);
  {
    const MemoryScope outer(Category::parameters);
    {
      const MemoryScope inner(Category::gradients);
      EXPECT_EQ(MemoryScope::current(), Category::gradients);
      std::thread([] { EXPECT_EQ(MemoryScope::current(), Category::activations); }).join();
    }
    EXPECT_EQ(MemoryScope::current(), Category::parameters);
  }
  EXPECT_EQ(MemoryScope::current(), Category::activations);
}

TEST_F(MemoryCountersTest, NothingIsLostBetweenThreads) {
  reset_peak_memory_stats();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 10000; ++i) {
        record_memory_allocated(Category::activations, 64);
        record_memory_allocated(Category::buffers, 8);
        record_memory_freed(Category::activations, 64);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(taken(Category::activations), 0);
  EXPECT_EQ(taken(Category::buffers), 4 * 10000 * 8);
  EXPECT_GE(max_memory_allocated().total() - before_.total(), 4 * 10000 * 8);
  EXPECT_LE(max_memory_allocated().total() - before_.total(), 4 * 10000 * 8 + 4 * 64);
  record_memory_freed(Category::buffers, 4 * 10000 * 8);
}

TEST_F(MemoryCountersTest, TextAddsUp) {
  MemoryCounts counts;
  counts[Category::parameters] = 192 << 20;
  counts[Category::activations] = 1 << 20;
  EXPECT_EQ(counts.text(),
            "193 MiB = parameters 192 MiB + gradients 0 B + optimizer 0 B + activations 1.00 MiB + buffers 0 B");
}

}  // namespace
}  // namespace phalanx::observe
