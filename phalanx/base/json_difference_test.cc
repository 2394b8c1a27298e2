#include "phalanx/base/json_difference.h"

#include <gtest/gtest.h>

#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

using nlohmann::json;

TEST(JsonDifference, NamesEachKeyWithBothValues) {
  const json saved = {{"a", {{"same", 1}, {"number", 2.5}, {"list", {1, 2}}, {"gone", "x"}}}, {"whole", 3}};
  const json found = {{"a", {{"same", 1.0}, {"number", 2.0}, {"list", {1, 3}}, {"new", true}}}, {"whole", 3}};
  std::vector<std::string> lines;
  for (const auto& d : json_differences(saved, found)) {
    lines.push_back(d.key + ": " + json_value_text(d.saved) + ", " + json_value_text(d.found));
  }
  EXPECT_THAT(lines, ElementsAre("a.gone: \"x\", not set", "a.list: [1,2], [1,3]", "a.new: not set, true",
                                 "a.number: 2.5, 2.0"));
  EXPECT_TRUE(json_differences(saved, saved).empty());
}

TEST(JsonDifference, AValueInPlaceOfAnObjectIsADifference) {
  const auto differences = json_differences({{"rope", {{"type", "linear"}}}}, {{"rope", nullptr}});
  ASSERT_EQ(differences.size(), 2U);
  EXPECT_EQ(differences[0].key, "rope");
  EXPECT_EQ(differences[1].key, "rope.type");
  EXPECT_TRUE(json_differences(json::object(), json::object()).empty());
}

TEST(JsonDifference, TextsAreShortAndPrintable) {
  EXPECT_EQ(json_value_text(std::nullopt), "not set");
  EXPECT_EQ(json_value_text(json(nullptr)), "not set");
  EXPECT_EQ(json_value_text(json(0.001)), "0.001");
  EXPECT_LT(json_value_text(json(std::string(1000, 'x'))).size(), 120U);
  for (const char c : json_value_text(json("\x1b[2J\xff\n"))) EXPECT_TRUE(c >= 0x20 && c < 0x7f);
}

}  // namespace
}  // namespace phalanx
