// What is found is what the parser with the messages finds.
#include "phalanx/data/corpus/record_text.h"

#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "phalanx/base/json_text.h"

namespace phalanx::data {
namespace record_text_test {

std::optional<std::string> found(const std::string& text, const std::string& field = "text") {
  RecordText texts(field);
  std::string line = text;
  const auto result = texts.find(line);
  EXPECT_EQ(line, text);
  if (!result) return std::nullopt;
  return std::string(*result);
}

/// By the other parser. Nothing: a fault, or no text.
std::optional<std::string> expected(const std::string& line, const std::string& field = "text") {
  nlohmann::json json;
  if (json_object_fault(line, json)) return std::nullopt;
  if (!json.contains(field) || !json[field].is_string()) return std::nullopt;
  return json[field].get<std::string>();
}

TEST(RecordText, IsThatOfTheField) {
  EXPECT_EQ(found(R"({"text": "one"})"), "one");
  EXPECT_EQ(found(R"( {"id": 1, "text": "caf\u00e9 \"x\"\n", "more": [{"text": "no"}]} )"), "caf\xc3\xa9 \"x\"\n");
  EXPECT_EQ(found(R"({"text": ""})"), "");
  EXPECT_EQ(found(R"({"a": {"b": "inner"}, "b": "outer"})", "a.b"), "inner");
  EXPECT_EQ(found(R"({"a": {"b": "inner"}, "a.b": "whole"})", "a.b"), "whole");
  const std::string large(100000, 'x');
  EXPECT_EQ(found(R"({"text": ")" + large + "\"}"), large);
}

TEST(RecordText, LeavesWhatIsNotCertainToTheOtherParser) {
  const std::string deep = std::string(99, '[') + std::string(99, ']'), deeper = "[" + deep + "]";
  for (const std::string line : {"",
                                 " ",
                                 "[1]",
                                 "\"text\"",
                                 "{",
                                 R"({"text": "a"} x)",
                                 R"({"text": null})",
                                 R"({"text": 1})",
                                 R"({"id": 1})",
                                 R"({"text": "a", "text": "b"})",
                                 R"({"text": "a", "x": {"k": 1, "k": 2}})",
                                 R"({"text": "a", "x": [{"":1,"":2}]})",
                                 R"({"text": "\ud83d\ude00"})",
                                 R"({"text": "\ud800"})",
                                 R"({"text": "\uDC00"})",
                                 R"({"text": "a", "n": 1e999})",
                                 "{\"text\": \"\xff\"}",
                                 "\xef\xbb\xbf{\"text\": \"a\"}",
                                 "{\"text\": \"a\nb\"}",
                                 R"({"text": "a", "n": 01})",
                                 R"({"text": "a", "n": NaN})",
                                 R"({"a": {"b": 1}})"}) {
    EXPECT_FALSE(found(line)) << line;
    EXPECT_FALSE(found(line, "a.b")) << line;
  }
  EXPECT_FALSE(found(R"({"text": "a", "x": )" + deeper + "}"));
  EXPECT_EQ(found(R"({"text": "a", "x": )" + deep + "}"), expected(R"({"text": "a", "x": )" + deep + "}"));
}

TEST(RecordText, AgreesWithTheOtherParserOnDamagedRecords) {
  const std::vector<std::string> records = {
      R"({"text": "one \\ \" \/ \b\f\n\r\t \u00e9 \u20ac \u0000", "n": [1, -2.5e3, true, false, null, {}]})",
      "{\"text\": \"caf\xc3\xa9 \xf0\x9f\x98\x80\", \"x\": {\"text\": \"y\", \"z\": [[\"\"]]}}",
      R"({"id": 12345678901234567890123, "text": "t", "text2": "u", "\u0074ext3": "v"})"};
  const std::string alphabet = "{}[]\",:\\0123456789eE+-.utfnld \x01\x7f\xc3\xa9\xed\xa0\x80\xff";
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  RecordText texts("text");
  int agreed = 0;
  for (int i = 0; i < 30000; ++i) {
    std::string line = records[below(records.size())];
    for (std::size_t changes = below(4); changes > 0; --changes) {
      const std::size_t at = below(line.size());
      if (below(3) == 0) {
        line.erase(at, 1);
      } else if (below(2) == 0) {
        line.insert(at, 1, alphabet[below(alphabet.size())]);
      } else {
        line[at] = alphabet[below(alphabet.size())];
      }
    }
    const auto result = texts.find(line);
    if (!result) continue;
    ++agreed;
    const auto other = expected(line);
    ASSERT_TRUE(other) << line;
    ASSERT_EQ(*other, *result) << line;
  }
  EXPECT_GT(agreed, 5000);
}

}  // namespace record_text_test
}  // namespace phalanx::data
