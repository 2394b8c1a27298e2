#include "phalanx/base/json_lines.h"

#include <gtest/gtest.h>

#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::json_lines_test {
namespace {

using Lines = std::vector<std::pair<std::string, std::string>>;

Lines lines_of(std::string_view text) {
  Lines lines;
  each_line(text, "a.jsonl", [&](std::string_view line, const std::string& where) { lines.emplace_back(line, where); });
  return lines;
}

TEST(JsonLines, BlankLinesAreCountedAndPassedOver) {
  EXPECT_EQ(lines_of("{}\n\n \t\r\n[1]"), (Lines{{"{}", "a.jsonl, line 1"}, {"[1]", "a.jsonl, line 4"}}));
  EXPECT_EQ(lines_of("{}\r\n"), (Lines{{"{}", "a.jsonl, line 1"}}));
  EXPECT_THAT(lines_of(""), IsEmpty());
}

TEST(JsonLines, AMarkOfUtf8IsPassedOverAndUtf16IsRefused) {
  EXPECT_EQ(lines_of("\xEF\xBB\xBF{}"), (Lines{{"{}", "a.jsonl, line 1"}}));
  EXPECT_THAT(error_text<DataError>([] { lines_of(std::string_view("\xFF\xFE{\0", 4)); }), HasSubstr("a.jsonl"));
}

TEST(JsonLines, AFileWithoutAUsableLineSaysHowManyWereSkipped) {
  EXPECT_EQ(no_line_left("a.jsonl", "prompts", {}), "a.jsonl holds no prompts");
  EXPECT_EQ(no_line_left("a.jsonl", "prompts", {"line 1: no text"}),
            "a.jsonl holds no prompts: its line is skipped, line 1: no text");
  EXPECT_EQ(no_line_left("a.jsonl", "prompts", {"line 1: no text", "line 2: too long"}),
            "a.jsonl holds no prompts: all its lines are skipped, the first because of line 1: no text");
}

}  // namespace
}  // namespace phalanx::json_lines_test
