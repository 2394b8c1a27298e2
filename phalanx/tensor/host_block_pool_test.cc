#include "phalanx/tensor/host_block_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace phalanx {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(HostBlockPool, ABlockOfTheSameSizeIsUsedAgain) {
  HostBlockPool pool;
  void* const first = pool.allocate(3 * kMiB, 1);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % (2 * kMiB), 0U);
  std::memset(first, 0x5a, 3 * kMiB);
  ASSERT_TRUE(pool.find(first));
  EXPECT_EQ(pool.find(first)->bytes, 3 * kMiB);
  EXPECT_EQ(pool.find(first)->tag, 1);
  pool.set_tag(first, 2);
  EXPECT_EQ(pool.free(first).tag, 2);
  EXPECT_FALSE(pool.find(first));
  EXPECT_EQ(pool.use().cached, 3 * kMiB);
  void* const second = pool.allocate(3 * kMiB - 1000, 0);  // about its size
  EXPECT_EQ(second, first);
  EXPECT_EQ(pool.use().cached, 0U);
  EXPECT_EQ(pool.find(second)->bytes, 3 * kMiB - 1000);
  void* const other = pool.allocate(5 * kMiB, 0);
  EXPECT_NE(other, first);
  EXPECT_FALSE(pool.find(static_cast<std::byte*>(other) + 4096));
  pool.free(other);
  pool.free(second);
}

// What a run with recomputation does: large intermediate results come and go, and small activations stay.
TEST(HostBlockPool, SmallBlocksThatStayDoNotSplitLargeOnes) {
  HostBlockPool pool;
  std::vector<void*> stay;
  for (int layer = 0; layer < 64; ++layer) {
    void* const large = pool.allocate(16 * kMiB, 0);
    pool.free(large);
    stay.push_back(pool.allocate(4 * kMiB, 0));
  }
  EXPECT_EQ(pool.use().in_use, 64 * 4 * kMiB);
  EXPECT_EQ(pool.use().cached, 16 * kMiB);
  for (void* const block : stay) pool.free(block);
}

TEST(HostBlockPool, WhatIsCachedHasABound) {
  HostBlockPool pool;
  // Sizes that no block before them has, to 480 MiB. Each is the only one in use.
  for (std::size_t i = 0; i < 40; ++i) {
    pool.free(pool.allocate((16 * kMiB << (i / 8)) / 8 * (8 + i % 8), 0));
    const HostBlockPool::Use use = pool.use();
    ASSERT_LE(use.in_use + use.cached, use.most_in_use + HostBlockPool::kSpareBytes) << i;
  }
  // A new highest use is not an excuse to keep more beside it.
  void* const whole = pool.allocate(512 * kMiB, 0);
  EXPECT_LE(pool.use().cached, HostBlockPool::kSpareBytes);
  pool.free(whole);
  // Steps of a run use again what they have freed, all of it.
  std::vector<void*> blocks(16);
  for (void*& block : blocks) block = pool.allocate(36 * kMiB, 0);
  for (void* const block : blocks) pool.free(block);
  EXPECT_GE(pool.use().cached, 16 * 36 * kMiB);
}

TEST(HostBlockPool, WhatIsFreeCanBeReturned) {
  HostBlockPool pool;
  void* const stays = pool.allocate(4 * kMiB, 0);
  pool.free(pool.allocate(64 * kMiB, 0));
  EXPECT_EQ(pool.use().most_in_use, 68 * kMiB);
  EXPECT_EQ(pool.trim(), 64 * kMiB);
  EXPECT_EQ(pool.use().cached, 0U);
  EXPECT_EQ(pool.use().most_in_use, 4 * kMiB);
  EXPECT_EQ(pool.trim(), 0U);
  pool.free(stays);
}

TEST(HostBlockPool, MemoryThatIsNotThereIsNoBlock) {
  HostBlockPool pool;
  EXPECT_EQ(pool.allocate(std::size_t{1} << 50, 0), nullptr);
  EXPECT_EQ(pool.allocate(~std::size_t{0}, 0), nullptr);
  EXPECT_EQ(pool.use().in_use, 0U);
}

TEST(HostBlockPool, ThreadsMayFreeWhatOthersHave) {
  HostBlockPool pool;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&pool, i] {
      for (int k = 0; k < 200; ++k) {
        void* const block = pool.allocate((1 + static_cast<std::size_t>(k + i) % 5) * kMiB, 0);
        std::memset(block, i, 4096);
        std::thread([&pool, block] { pool.free(block); }).join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.use().in_use, 0U);
}

}  // namespace
}  // namespace phalanx
