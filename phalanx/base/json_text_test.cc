#include "phalanx/base/json_text.h"

#include <gtest/gtest.h>

#include <string>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

std::string fault_of(std::string_view text) {
  nlohmann::json json = "as it was";
  const auto fault = json_object_fault(text, json);
  EXPECT_EQ(fault.has_value(), json == "as it was") << text;
  return fault.value_or("");
}

TEST(JsonText, AnObjectIsRead) { EXPECT_EQ(parse_json_object<DataError>("{\"a\": [1, 2]}\r\n", "f")["a"][1], 2); }

TEST(JsonText, WhatIsWrongIsSaidWithItsPlace) {
  EXPECT_EQ(fault_of("{\n  \"a\": 1,\n  b\n}"),
            "not valid JSON at line 3, column 3: syntax error while parsing object key - invalid literal; last read: "
            "'1,<U+000A>  b'; expected string literal");
  EXPECT_EQ(fault_of("hello\n").substr(0, 47), "not valid JSON at column 1: syntax error while ");
  EXPECT_EQ(fault_of("{\"a\": 1").substr(0, 44), "not valid JSON at column 8: syntax error whi");
  EXPECT_EQ(fault_of("").substr(0, 30), "not valid JSON at column 1: sy");
  EXPECT_EQ(fault_of("{\"a\": 1e999}"), "not valid JSON: number overflow parsing '1e999'");
  EXPECT_EQ(fault_of("[1]"), "expected a JSON object, found array");
  EXPECT_EQ(fault_of("3"), "expected a JSON object, found number");
  EXPECT_EQ(fault_of(std::string(200'000, '[')), "its JSON nests deeper than 100 levels");
}

TEST(JsonText, MessagesAreShortAndPrintableWhateverTheTextIs) {
  const std::string hostile = "{\"" + std::string(100'000, 'a') + "\xff\x1b[31m";
  const std::string fault = fault_of(hostile);
  EXPECT_LT(fault.size(), 300u);
  for (const char c : fault_of("{\"\xff\x1b[31m\x07")) EXPECT_TRUE(c >= ' ' && c <= '~') << static_cast<int>(c);
}

TEST(JsonText, TheErrorIsTheCallersAndBeginsWithWhere) {
  try {
    parse_json_object<CheckpointError>("[]", "model/config.json");
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_STREQ(error.what(), "model/config.json: expected a JSON object, found array");
  }
}

}  // namespace
}  // namespace phalanx
