#include "phalanx/base/philox.h"

#include <gtest/gtest.h>

#include <vector>

namespace phalanx {
namespace {

// Known-answer vectors of the Random123 distribution (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  static_assert(philox4x32({0, 0, 0, 0}, {0, 0})[0] == 0x6627e8d5, "usable at compile time");
}

TEST(Philox, StreamIsTheBlocksInOrderAndSeekable) {
  PhiloxStream stream(0);
  EXPECT_EQ(stream.next_u32(), 0x6627e8d5u);
  EXPECT_EQ(stream.next_u64(), 0xbc57ac4ce169c58du);
  std::vector<std::uint32_t> rest;
  for (int i = 0; i < 10; ++i) rest.push_back(stream.next_u32());
  EXPECT_EQ(stream.position(), 13u);
  EXPECT_EQ(rest[1], philox4x32({1, 0, 0, 0}, {0, 0})[0]);

  PhiloxStream resumed(0);
  resumed.seek(3);
  for (const std::uint32_t word : rest) EXPECT_EQ(resumed.next_u32(), word);
}

TEST(Philox, SeedAndSubstreamChangeEverything) {
  EXPECT_NE(PhiloxStream(1).next_u64(), PhiloxStream(2).next_u64());
  EXPECT_NE(PhiloxStream(1, 0).next_u64(), PhiloxStream(1, 1).next_u64());
  EXPECT_NE(PhiloxStream(1).next_u64(), PhiloxStream(1 + (std::uint64_t{1} << 32)).next_u64());
}

TEST(Philox, UniformAndBelowCoverTheirRangesEvenly) {
  PhiloxStream stream(7);
  constexpr int kDraws = 60'000;
  double sum = 0;
  std::vector<int> counts(6);
  for (int i = 0; i < kDraws; ++i) {
    const double u = stream.uniform();
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
    ++counts[stream.below(counts.size())];
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 5 * 0.2887 / 245);                         // five standard errors
  for (const int count : counts) EXPECT_NEAR(count, kDraws / 6, 5 * 91.3);  // five standard deviations
  EXPECT_EQ(stream.below(1), 0u);
}

}  // namespace
}  // namespace phalanx
