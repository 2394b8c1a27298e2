// Streaming copies of every length and alignment; not a byte beyond the range is written.
#include "phalanx/comm/stream_copy.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <vector>

namespace phalanx {
namespace {

class StreamCopy : public ::testing::TestWithParam<void (*)(void*, const void*, std::size_t)> {};

TEST_P(StreamCopy, MovesTheBytesAndNoOthers) {
  constexpr std::size_t kRoom = 1U << 16;
  constexpr auto kGuard = std::byte{0xEE};
  std::vector<std::byte> from(kRoom);
  for (std::size_t i = 0; i < kRoom; ++i) from[i] = static_cast<std::byte>(i * 131 + i / 251);
  std::vector<std::byte> to(kRoom);
  for (const std::size_t bytes : {0, 1, 4, 63, 64, 65, 255, 256, 257, 320, 511, 512, 1000, 4096, 40'007})
    for (std::size_t to_shift = 0; to_shift < 64; to_shift += 3)
      for (const std::size_t from_shift : {0, 1, 4, 16, 33, 63}) {
        std::memset(to.data(), static_cast<int>(kGuard), bytes + to_shift + 400);
        GetParam()(to.data() + 64 + to_shift, from.data() + from_shift, bytes);
        ASSERT_EQ(std::memcmp(to.data() + 64 + to_shift, from.data() + from_shift, bytes), 0)
            << bytes << " bytes, " << to_shift << ", " << from_shift;
        for (std::size_t i = 0; i < 64 + to_shift; ++i) ASSERT_EQ(to[i], kGuard) << "before";
        for (std::size_t i = 0; i < 256; ++i) ASSERT_EQ(to[64 + to_shift + bytes + i], kGuard) << "after";
      }
}

TEST_P(StreamCopy, ReadsAndWritesUpToTheEndOfAMapping) {
  constexpr std::size_t kPage = 4096;
  const auto map = [] {
    void* memory = mmap(nullptr, 3 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(static_cast<std::byte*>(memory) + 2 * kPage, kPage, PROT_NONE);
    return static_cast<std::byte*>(memory);
  };
  std::byte* from = map();
  std::byte* to = map();
  for (std::size_t i = 0; i < 2 * kPage; ++i) from[i] = static_cast<std::byte>(i * 7);
  for (const std::size_t bytes : {2 * kPage, 2 * kPage - 1, 2 * kPage - 64, kPage + 5}) {
    std::memset(to, 0, 2 * kPage);
    GetParam()(to + 2 * kPage - bytes, from + 2 * kPage - bytes, bytes);
    EXPECT_EQ(std::memcmp(to + 2 * kPage - bytes, from + 2 * kPage - bytes, bytes), 0) << bytes;
  }
  munmap(from, 3 * kPage);
  munmap(to, 3 * kPage);
}

TEST(StreamedPart, IsWhatTheSharedCacheHasNoRoomFor) {
  constexpr std::size_t kMiB = 1U << 20;
  const LastLevelCache cache{.bytes = 16 * kMiB, .cores = 4};
  EXPECT_EQ(streamed_part(kStreamBytes, kStreamBytes, 2, cache), kStreamBytes) << "a long one, whole";
  EXPECT_EQ(streamed_part(4 * kMiB, 6 * kMiB, 2, cache), 0U) << "twice 6 MiB are three quarters of it";
  EXPECT_EQ(streamed_part(4 * kMiB, 8 * kMiB, 2, cache), 2 * kMiB);
  EXPECT_EQ(streamed_part(kMiB, 8 * kMiB, 8, cache), kMiB) << "no more than the result; four of the ranks share it";
  EXPECT_EQ(streamed_part(kMiB, 3 * kMiB, 8, cache), 0U);
  EXPECT_EQ(streamed_part(4 * kMiB, 8 * kMiB, 2, LastLevelCache{}), 0U) << "a cache of which nothing is known";
}

INSTANTIATE_TEST_SUITE_P(Forms, StreamCopy, ::testing::Values(&stream_copy, &stream_copy_baseline));

}  // namespace
}  // namespace phalanx
