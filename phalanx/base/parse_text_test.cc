#include "phalanx/base/parse_text.h"

#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

TEST(ParseText, SizesHaveBinaryUnits) {
  EXPECT_EQ(parse_size("-b", "4096"), 4096);
  EXPECT_EQ(parse_size("-b", "4K"), 4096);
  EXPECT_EQ(parse_size("-b", "4KiB"), 4096);
  EXPECT_EQ(parse_size("-b", "1mb"), 1 << 20);
  EXPECT_EQ(parse_size("-b", "2G"), std::int64_t{2} << 30);
  EXPECT_EQ(parse_size("-b", "1TiB"), std::int64_t{1} << 40);
  for (const char* wrong : {"", "K", "4X", "-4", "4K4", "99999999999G", "1.5M", "2T"}) {
    try {
      parse_size("--min-bytes", wrong);
      ADD_FAILURE() << wrong;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), StartsWith("--min-bytes: '")) << wrong;
    }
  }
}

TEST(ParseText, ANumberIsTheWholeText) {
  EXPECT_EQ(parse_whole<std::int64_t>("-12"), -12);
  EXPECT_EQ(parse_whole<double>("2.5e-3"), 2.5e-3);
  for (const char* wrong : {"", " 1", "1 ", "1.5", "twelve", "99999999999999999999"}) {
    EXPECT_EQ(parse_whole<std::int64_t>(wrong), std::nullopt) << wrong;
  }
}

TEST(ParseText, ListsAreCutAtCommas) {
  EXPECT_THAT(split_list("a,b c,,d"), ElementsAre("a", "b c", "", "d"));
  EXPECT_THAT(split_list(""), ElementsAre(""));
}

}  // namespace
}  // namespace phalanx
