#include "phalanx/base/json_depth.h"

#include <gtest/gtest.h>

#include <string>

namespace phalanx {
namespace {

TEST(JsonDepth, CountsOpenBracketsOfBothKinds) {
  EXPECT_FALSE(is_json_too_deep("", 0));
  EXPECT_FALSE(is_json_too_deep("1", 0));
  EXPECT_TRUE(is_json_too_deep("[]", 0));
  EXPECT_FALSE(is_json_too_deep("[{}, [1], {\"a\": []}]", 3));
  EXPECT_TRUE(is_json_too_deep("[{}, [1], {\"a\": []}]", 2));
  EXPECT_FALSE(is_json_too_deep(std::string(100, '[')));
  EXPECT_TRUE(is_json_too_deep(std::string(101, '[')));
}

TEST(JsonDepth, BracketsInStringsDoNotCount) {
  EXPECT_FALSE(is_json_too_deep(R"(["[[[[", "\"[[", "\\"])", 1));
  EXPECT_TRUE(is_json_too_deep(R"(["\\", [1]])", 1));
}

}  // namespace
}  // namespace phalanx
