#include "phalanx/base/process_stats.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

namespace phalanx {
namespace {

TEST(ProcessStats, TouchedMemoryShowsUp) {
  constexpr std::size_t kBytes = 64 << 20;
  constexpr std::size_t kSlack = 8 << 20;
  const std::uint64_t before = resident_bytes();
  const std::uint64_t before_pss = proportional_bytes();
  ASSERT_GT(before, 0u);
  ASSERT_GT(before_pss, 0u);
  EXPECT_LE(before_pss, before + kSlack);
  const std::unique_ptr<char[]> block(new char[kBytes]);
  std::memset(block.get(), 1, kBytes);
  EXPECT_GE(resident_bytes() + kSlack, before + kBytes);
  EXPECT_GE(proportional_bytes() + kSlack, before_pss + kBytes);
  EXPECT_GE(peak_resident_bytes() + kSlack, before + kBytes);
  EXPECT_EQ(block[kBytes - 1], 1);
}

TEST(ProcessStats, WorkShowsUpInBothClocks) {
  const double process = process_cpu_seconds();
  const double thread = thread_cpu_seconds();
  volatile double sink = 0;
  while (thread_cpu_seconds() < thread + 0.01) sink = sink + 1;
  EXPECT_GE(process_cpu_seconds() - process, 0.0099);
}

}  // namespace
}  // namespace phalanx
