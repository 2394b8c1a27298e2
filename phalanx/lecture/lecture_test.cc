#include "phalanx/lecture/lecture.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/lecture/excerpt.h"
#include "phalanx/lecture/html_page.h"

namespace phalanx::lecture {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// The lines of all texts that begin with @, as words.
std::vector<std::vector<std::string>> directives() {
  std::vector<std::vector<std::string>> found;
  for (const Section& section : sections()) {
    std::istringstream in{std::string(section.text->text)};
    for (std::string line; std::getline(in, line);) {
      if (!line.starts_with("@")) continue;
      std::istringstream words(line);
      found.emplace_back();
      for (std::string word; words >> word;) found.back().push_back(word);
    }
  }
  return found;
}

TEST(Lecture, EveryStepIsRunByASectionAndEverySourceIsQuoted) {
  std::set<std::string> named;
  for (const auto& words : directives()) named.insert(words.at(1));
  for (const Step& step : steps()) EXPECT_TRUE(named.contains(std::string(step.name))) << step.name;
  for (const Source& source : sources()) EXPECT_TRUE(named.contains(std::string(source.file))) << source.file;
}

TEST(Lecture, EverySectionHasATitleAndAnId) {
  std::set<std::string_view> ids;
  for (const Section& section : sections()) {
    EXPECT_TRUE(ids.insert(section.id).second) << section.id;
    EXPECT_TRUE(section.text->text.starts_with("## ")) << section.id;
    EXPECT_THAT(list_of_sections(), HasSubstr(std::string(section.title())));
  }
}

TEST(Lecture, EveryCheckHoldsWithOneRankAndWithTwo) {
  for (const int ranks : {1, 2}) {
    for (const Section& section : sections()) {
      const WrittenSection written = write_section(section, {.ranks = ranks});
      EXPECT_TRUE(written.all_hold) << written.markdown;
      EXPECT_THAT(written.markdown, Not(HasSubstr("\n@"))) << section.id;
    }
  }
}

TEST(Lecture, AnUnknownSectionIsAnErrorThatNamesTheNearest) {
  EXPECT_THAT(error_text<UsageError>([] { chosen_sections({"tensr"}); }),
              AllOf(HasSubstr("no section 'tensr' (did you mean 'tensor'?)"), HasSubstr("phalanx lecture --list")));
  EXPECT_EQ(chosen_sections({"zero", "why"}).front()->id, "why");
  EXPECT_EQ(chosen_sections({}).size(), sections().size());
}

TEST(Lecture, ADirectiveThatNamesNothingIsAnError) {
  for (const auto& [text, says] :
       {std::pair("## A\n@run no_such\n", "no step 'no_such'"),
        std::pair("## A\n@code recipes/none.cc f\n", "does not hold the source 'recipes/none.cc'"),
        std::pair("## A\n@draw x\n", "expected @run STEP, @code FILE NAME or @lines FILE FIRST ... LAST")}) {
    const EmbeddedText embedded{text, ""};
    const Section section{"a", 1, &embedded};
    EXPECT_THAT(error_text<Error>([&] { write_section(section, {}); }), HasSubstr(says));
  }
}

TEST(Lecture, TheTerminalShowsCodeIndentedAndLinksAsTheirText) {
  EXPECT_EQ(terminal_text("## A\n\n**see** [b](c.md)\n```text\nx\n```\n### E\n"), "A\n=\n\nsee b\n    x\nE\n-\n");
}

TEST(Stage, LinesOfRanksComeInTheOrderOfRanksUnderTheirTitle) {
  Stage stage({.ranks = 2});
  stage.on_ranks(2, [](Rank& rank) {
    rank.say("before", tensor_text(at::full({1}, rank.number())));
    rank.say("after", "x");
    rank.check(rank.number() < 2, "numbers are small");
  });
  EXPECT_EQ(stage.take_output(),
            "before\n  rank 0: [0]\n  rank 1: [1]\nafter\n  ranks 0-1: x\n"
            "check: numbers are small: holds\n");
  EXPECT_TRUE(stage.all_hold());
}

TEST(Stage, ACheckThatFailsOnOneRankDoesNotHold) {
  Stage stage({.ranks = 2});
  stage.on_ranks(2, [](Rank& rank) { rank.check(rank.number() == 0, "all are rank 0"); });
  EXPECT_EQ(stage.take_output(), "check: all are rank 0: DOES NOT HOLD\n");
  EXPECT_FALSE(stage.all_hold());
}

TEST(Stage, RefusesOtherNumbersOfRanks) {
  EXPECT_THAT(error_text<UsageError>([] { Stage({.ranks = 3}); }), HasSubstr("--ranks has 3: expected 1, 2 or 4"));
}

TEST(Stage, ComparesTensors) {
  EXPECT_TRUE(are_close(at::full({2}, 1.000001), at::full({2}, 1.0)));
  EXPECT_FALSE(are_close(at::full({2}, 1.001), at::full({2}, 1.0)));
  EXPECT_FALSE(are_close(at::full({2}, NAN), at::full({2}, 1.0)));
  EXPECT_FALSE(are_close(at::full({1}, 1.0), at::full({2}, 1.0)));
  EXPECT_EQ(tensor_text(at::tensor({1.5F, 2.0F, 3.0F, 4.0F}).reshape({2, 2})), "[1.5,2] [3,4]");
}

constexpr std::string_view kSource = R"(struct A {
  // Doubles it.
  int twice(int x) {
    if (x == 0) {
      return 0;
    }
    return 2 * x;
  }  // not thrice
};
int main() {
  f(twice(1));

  g();
}
void open() {
)";

TEST(Excerpt, TakesAFunctionWithItsComment) {
  EXPECT_EQ(
      function_of(kSource, "twice", "a.cc"),
      "// Doubles it.\nint twice(int x) {\n  if (x == 0) {\n    return 0;\n  }\n  return 2 * x;\n}  // not thrice\n");
}

TEST(Excerpt, TakesLines) { EXPECT_EQ(lines_of(kSource, "f(", "g(", "a.cc"), "f(twice(1));\n\ng();\n"); }

TEST(Excerpt, WhatIsNotThereOrDoesNotEndIsAnErrorThatNamesTheFile) {
  for (const char* name : {"thrice", "open", "f"}) {
    EXPECT_THAT(error_text<Error>([&] { function_of(kSource, name, "a.cc"); }),
                HasSubstr("a.cc has no function '" + std::string(name)));
  }
  EXPECT_THAT(error_text<Error>([] { lines_of(kSource, "g(", "f(", "a.cc"); }),
              HasSubstr("a.cc has no line with 'g(', followed by one with 'f('"));
}

TEST(HtmlPage, WritesTheMarkdownThatTheTextsUse) {
  EXPECT_EQ(html_of_markdown("### A `b`\n\none **two**\n\n- x\n- y\n"),
            "<h3>A <code>b</code></h3>\n<p>one <strong>two</strong>\n</p>\n<ul><li>x\n<li>y\n</ul>\n");
  EXPECT_EQ(html_of_markdown("```text\na < b\n\n# c\n```\n"), "<pre>a &lt; b\n\n# c\n</pre>\n");
  EXPECT_THAT(html_of_markdown("| a | b |\n| --- | --- |\n| 1 | 2 |\n"),
              AllOf(HasSubstr("<tr><th>a</th><th>b</th></tr>"), HasSubstr("<tr><td>1</td><td>2</td></tr>"),
                    Not(HasSubstr("---"))));
}

TEST(HtmlPage, LinksOnlyToTheWeb) {
  EXPECT_EQ(html_of_markdown("[a](https://x.org/y) [b](c.md)\n"), "<p><a href=\"https://x.org/y\">a</a> b\n</p>\n");
}

TEST(HtmlPage, LoadsNothing) {
  const std::string page = html_page({{.section = sections().data(), .markdown = "## A\n"}});
  EXPECT_THAT(page, AllOf(HasSubstr("default-src 'none'"), Not(HasSubstr("<script")), Not(HasSubstr("src="))));
  EXPECT_THAT(page, HasSubstr("<a href=\"#why\">"));
}

}  // namespace
}  // namespace phalanx::lecture
