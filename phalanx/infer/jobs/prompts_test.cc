#include "phalanx/infer/jobs/prompts.h"

#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::infer {
namespace {

std::string fault(std::string_view contents, const PromptFormat& format = {}) {
  return error_text<DataError>([&] { parse_prompts(contents, "p.jsonl", format); });
}

TEST(Prompts, LinesOfTextAreNumbered) {
  const auto read = parse_prompts("one\r\n\n two\n{\"prompt\": 3}", "p.txt", {.json_lines = false});
  ASSERT_EQ(read.all.size(), 3u);
  EXPECT_EQ(read.all[0].text, "one");
  EXPECT_EQ(read.all[1].text, " two");
  EXPECT_EQ(read.all[1].id, "1");
  EXPECT_EQ(read.all[2].text, "{\"prompt\": 3}");
}

TEST(Prompts, AnIdThatIsThereTwiceIsTold) {
  const std::string lines = "{\"prompt\": \"a\", \"id\": 1}\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\", \"id\": \"1\"}\n";
  EXPECT_THAT(parse_prompts(lines, "p.jsonl").repeated,
              ElementsAre("p.jsonl, line 2: the id 1 is also that of p.jsonl, line 1"));
  EXPECT_TRUE(parse_prompts("{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n", "p.jsonl").repeated.empty());
}

TEST(Prompts, AMarkOfUtf8IsPassedOverAndUtf16IsRefused) {
  EXPECT_EQ(parse_prompts("\xEF\xBB\xBFone\n", "p.txt", {.json_lines = false}).all[0].text, "one");
  EXPECT_EQ(parse_prompts("\xEF\xBB\xBF{\"prompt\": \"x\"}\n", "p.jsonl").all[0].text, "x");
  EXPECT_THAT(fault(std::string_view("\xFF\xFE{\0}\0", 6)),
              StartsWith("p.jsonl: this is UTF-16LE text: expected UTF-8"));
}

TEST(Prompts, JsonLinesHaveTextOrTokensAndPerhapsAnId) {
  const auto read = parse_prompts(
      "{\"id\": \"a\", \"prompt\": \"x\\ny\"}\n\n{\"ids\": [1, 2], \"id\": {\"n\": 1}}\n{\"prompt\": \"\"}", "p.jsonl");
  ASSERT_EQ(read.all.size(), 3u);
  EXPECT_EQ(read.all[0].id, "\"a\"");
  EXPECT_EQ(read.all[0].text, "x\ny");
  EXPECT_EQ(read.all[1].id, "{\"n\":1}");
  EXPECT_FALSE(read.all[1].text);
  EXPECT_THAT(read.all[1].ids, ElementsAre(1, 2));
  EXPECT_EQ(read.all[2].id, "2");
}

TEST(Prompts, FieldsMayHaveOtherNamesAndLinesWithoutAreSkippedWhereWished) {
  const PromptFormat format{.prompt_field = "input", .id_field = "unique_id", .skips_malformed = true};
  const auto read = parse_prompts("{\"unique_id\": 9, \"input\": \"x\"}\n{\"prompt\": \"y\"}\n{\"input\": \"z\"}\n",
                                  "p.jsonl", format);
  ASSERT_EQ(read.all.size(), 2u);
  EXPECT_EQ(read.all[0].id, "9");
  EXPECT_EQ(read.all[1].id, "2") << "whatever else is skipped";
  EXPECT_EQ(read.all[1].number, 2u);
  EXPECT_THAT(read.skipped, ElementsAre("p.jsonl, line 2: neither \"input\" (text) nor \"ids\" (token ids)"));
  EXPECT_EQ(fault("{\"x\": 1}", format),
            "p.jsonl holds no prompts: its line is skipped, p.jsonl, line 1: neither \"input\" (text) nor \"ids\" "
            "(token ids)");
}

TEST(Prompts, EveryKindOfMalformedLineIsSkippedWhereWished) {
  const auto read = parse_prompts(
      "{\"prompt\": \"a\"}\n{\"prompt\": \"b\n[1]\n{\"prompt\": 7}\n{\"ids\": [1.5]}\n{\"ids\": [1], \"prompt\": "
      "\"x\"}\n"
      "{\"prompt\": \"c\"}\n",
      "p.jsonl", {.skips_malformed = true});
  ASSERT_EQ(read.all.size(), 2u);
  EXPECT_EQ(read.all[1].text, "c");
  EXPECT_EQ(read.all[1].where, "p.jsonl, line 7");
  EXPECT_EQ(read.all[1].number, 6u);
  EXPECT_THAT(read.skipped, ElementsAre(StartsWith("p.jsonl, line 2: not valid JSON at column 14: "),
                                        "p.jsonl, line 3: expected a JSON object, found array",
                                        "p.jsonl, line 4: \"prompt\" must be a string",
                                        "p.jsonl, line 5: \"ids\" must be a list of integers",
                                        StartsWith("p.jsonl, line 6: expected either \"prompt\"")));
}

TEST(Prompts, ALineOfBlanksIsAnEmptyLine) {
  EXPECT_EQ(parse_prompts("{\"prompt\": \"a\"}\n \t \r\n{\"prompt\": \"b\"}\n  ", "p.jsonl").all.size(), 2u);
  const auto text = parse_prompts("a\n  \t\n b ", "p.txt", {.json_lines = false});
  ASSERT_EQ(text.all.size(), 2u);
  EXPECT_EQ(text.all[1].text, " b ");
}

TEST(Prompts, WhatIsWrongWithALineIsNamed) {
  EXPECT_EQ(fault(""), "p.jsonl holds no prompts");
  EXPECT_EQ(fault("{\"prompt\": \"x\"}\n[1]"), "p.jsonl, line 2: expected a JSON object, found array");
  EXPECT_THAT(fault("{\"prompt\": \"x"), StartsWith("p.jsonl, line 1: not valid JSON at column 14: "));
  EXPECT_THAT(fault("{\"prompt\": \"\xff\"}"), StartsWith("p.jsonl, line 1: not valid JSON at column 13: "));
  // Printing so deep an id would end the program by a stack overflow.
  EXPECT_EQ(fault("{\"prompt\": \"x\", \"id\": " + std::string(200000, '[') + std::string(200000, ']') + "}"),
            "p.jsonl, line 1: its JSON nests deeper than 100 levels");
  EXPECT_EQ(fault("{\"id\": 1}"), "p.jsonl, line 1: neither \"prompt\" (text) nor \"ids\" (token ids)");
  EXPECT_EQ(fault("{\"prompt\": 7}"), "p.jsonl, line 1: \"prompt\" must be a string");
  EXPECT_EQ(fault("{\"ids\": \"1\"}"), "p.jsonl, line 1: \"ids\" must be a list of integers");
  EXPECT_EQ(fault("{\"ids\": [1, 2.5]}"), "p.jsonl, line 1: \"ids\" must be a list of integers");
  EXPECT_EQ(fault("{\"ids\": [18446744073709551615]}"), "p.jsonl, line 1: \"ids\" must be a list of integers");
  EXPECT_EQ(fault("{\"ids\": [1], \"prompt\": \"x\"}"),
            "p.jsonl, line 1: expected either \"prompt\" (text) or \"ids\" (token ids), found both");
}

}  // namespace
}  // namespace phalanx::infer
