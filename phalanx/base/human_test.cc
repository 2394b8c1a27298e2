#include "phalanx/base/human.h"

#include <gtest/gtest.h>

#include <limits>

namespace phalanx {
namespace {

TEST(Human, Bytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.00 KiB");
  EXPECT_EQ(human_bytes(std::uint64_t{1} << 26), "64.0 MiB");
  EXPECT_EQ(human_bytes((std::uint64_t{1} << 30) - 1), "1.00 GiB");
  EXPECT_EQ(human_bytes(1'299'227'607), "1.21 GiB");
  EXPECT_EQ(human_bytes(std::numeric_limits<std::uint64_t>::max()), "16384 PiB");
  EXPECT_EQ(human_bytes_per_second(12'345'678), "12.3 MB/s");
  EXPECT_EQ(human_bytes_per_second(0), "0 B/s");
}

TEST(Human, Counts) {
  EXPECT_EQ(human_count(950), "950");
  EXPECT_EQ(human_count(5'030), "5.03 k");
  EXPECT_EQ(human_count(6'738'415'616.0), "6.74 B");
  EXPECT_EQ(human_count(999'999), "1.00 M");
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(-1000), "-1,000");
  EXPECT_EQ(with_commas(1234567), "1,234,567");
  EXPECT_EQ(with_commas(std::numeric_limits<std::int64_t>::min()), "-9,223,372,036,854,775,808");
}

TEST(Human, Durations) {
  EXPECT_EQ(human_duration(0), "0 us");
  EXPECT_EQ(human_duration(0.00035), "350 us");
  EXPECT_EQ(human_duration(0.9999e-3), "1.00 ms");
  EXPECT_EQ(human_duration(0.045), "45.0 ms");
  EXPECT_EQ(human_duration(3.2), "3.20 s");
  EXPECT_EQ(human_duration(59.99), "1m 00s");
  EXPECT_EQ(human_duration(125), "2m 05s");
  EXPECT_EQ(human_duration(3725), "1h 02m");
  EXPECT_EQ(human_duration(3 * 86400 + 4 * 3600), "3d 04h");
  EXPECT_EQ(human_duration(-2), "-2.00 s");
  EXPECT_EQ(human_duration(1e300), "unknown");
  EXPECT_EQ(human_duration(std::numeric_limits<double>::quiet_NaN()), "unknown");
}

}  // namespace
}  // namespace phalanx
