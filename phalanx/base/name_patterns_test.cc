#include "phalanx/base/name_patterns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"

namespace phalanx {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<std::string> kNames = {"layers.0.norm.weight", "layers.0.wq.weight", "layers.12.wq.bias", "output"};

TEST(NamePatterns, MatchWholeNames) {
  EXPECT_THAT(matching_names("keys", {}, kNames), ElementsAre(false, false, false, false));
  EXPECT_THAT(matching_names("keys", {"*norm*", "*.bias"}, kNames), ElementsAre(true, false, true, false));
  EXPECT_THAT(matching_names("keys", {"layers.?.*"}, kNames), ElementsAre(true, true, false, false));
  EXPECT_THAT(matching_names("keys", {"layers.[1-9]*"}, kNames), ElementsAre(false, false, true, false));
  EXPECT_THAT(matching_names("keys", {"*"}, kNames), ElementsAre(true, true, true, true));
}

TEST(NamePatterns, OneThatMatchesNothingIsAnError) {
  // A part of a name is not the name.
  EXPECT_THAT(error_text<ConfigError>([] {
                matching_names("[training] frozen", {"*", "outpu"}, kNames);
              }),
              AllOf(HasSubstr("[training] frozen"), HasSubstr("'outpu'"), HasSubstr("'output'")));
}

TEST(NamePatterns, NumbersBetweenDotsAreLeftOut) {
  EXPECT_EQ(without_numbers("layers.12.moe.experts.0.w1.weight"), "layers.*.moe.experts.*.w1.weight");
  EXPECT_EQ(without_numbers("output"), "output");
}

TEST(NamePatterns, DistanceCountsWhatStarsDoNotCover) {
  EXPECT_EQ(pattern_distance("*norm*", "layers.0.attention_norm.weight"), 0U);
  EXPECT_EQ(pattern_distance("*nrom*", "layers.0.attention_norm.weight"), 2U);
  EXPECT_EQ(pattern_distance("*.bais", "wq.bias"), 2U);
  EXPECT_EQ(pattern_distance("w?.weight", "wq.weight"), 0U);
  EXPECT_EQ(pattern_distance("", "abc"), 3U);
  EXPECT_EQ(pattern_distance("abc", ""), 3U);
  EXPECT_EQ(pattern_distance("*", ""), 0U);
}

}  // namespace
}  // namespace phalanx
