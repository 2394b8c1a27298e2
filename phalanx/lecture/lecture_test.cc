#include "phalanx/lecture/lecture.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/lecture/excerpt.h"
#include "phalanx/lecture/flow.h"
#include "phalanx/lecture/html_page.h"
#include "phalanx/lecture/levels.h"
#include "phalanx/lecture/timeline.h"
#include "phalanx/lecture/tree.h"

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
      if (ranks == 1 || section.id == "summary") continue;
      EXPECT_THAT(written.pictures, Not(::testing::IsEmpty())) << section.id;
      EXPECT_THAT(written.markdown, AllOf(HasSubstr("\nholds: "), HasSubstr("### Notice\n"),
                                          HasSubstr("### Exercise\n"), HasSubstr("### Answer\n"),
                                          ::testing::AnyOf(HasSubstr("\n  rank 0: "), HasSubstr("\n  ranks 0-1: "),
                                                           HasSubstr(" rank 0 "))))
          << section.id;
    }
  }
}

/// The lines between "```language" and the fence that closes it, of all such blocks.
std::vector<std::string> lines_of_blocks(const std::string& markdown, const std::set<std::string>& fences) {
  std::vector<std::string> lines;
  std::istringstream in(markdown);
  bool is_inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```")) {
      is_inside = fences.contains(line);
    } else if (is_inside) {
      lines.push_back(line);
    }
  }
  return lines;
}

TEST(Lecture, EverySectionShowsTwentyToFortyLinesOfCode) {
  for (const Section& section : sections()) {
    if (section.id == "summary") continue;
    std::string without_steps = "## A\n";  // what they print needs no run here
    std::istringstream in{std::string(section.text->text)};
    for (std::string line; std::getline(in, line);) without_steps += line.starts_with("@run") ? "" : line + "\n";
    const EmbeddedText text{without_steps, ""};
    const WrittenSection written = write_section({section.id, section.part, &text}, {.ranks = 1});
    const std::size_t lines = lines_of_blocks(written.markdown, {"```cpp", "```bash"}).size();
    EXPECT_TRUE(lines >= 20 && lines <= 40) << section.id << " has " << lines;
  }
}

TEST(Lecture, BehindTheCodeOfARecipeStandsItsCommand) {
  const EmbeddedText text{
      "## A\n@code recipes/ddp_by_hand.cc average_gradients\n@code phalanx/lecture/ring.cc ring_all_reduce\n", ""};
  const WrittenSection written = write_section({"a", 1, &text}, {.ranks = 1});
  EXPECT_THAT(lines_of_blocks(written.markdown, {"```sh"}),
              ::testing::ElementsAre("phalanx launch --nproc-per-node 2 -- ddp_by_hand --per-rank"));
}

TEST(Lecture, SaysWhenAndWhereItsNumbersWereMeasured) {
  EXPECT_THAT(opening(),
              ::testing::ContainsRegex("\nMeasured on ~ 20[0-9][0-9]-[01][0-9]-[0-3][0-9], .*, [1-9][0-9]* CPUs\n"));
  EXPECT_THAT(html_page({}), ::testing::ContainsRegex("Measured on ~ 20[0-9][0-9]-"));
}

TEST(Lecture, TheTableOfItsSourcesNamesSections) {
  std::set<std::string> ids, named;
  for (const Section& section : sections()) ids.emplace(section.id);
  std::istringstream in{std::string(kTableText.text)};
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("|") || line.starts_with("|---") || line.starts_with("|topic")) continue;
    const std::size_t begin = line.find('|', 1) + 1;
    std::istringstream cell(line.substr(begin, line.find('|', begin) - begin));
    for (std::string id; std::getline(cell >> std::ws, id, ',');) named.insert(id);
  }
  EXPECT_EQ(named, ids);
}

TEST(Levels, OneThatIsNoFasterThanOneBehindItIsNotToldApart) {
  const auto level = [](const char* name, double speed) {
    return measure::MemoryLevel{.name = name, .one_cpu = speed};
  };
  const std::vector<measure::MemoryLevel> levels = {level("L1", 9), level("L2", 4), level("L3", 2), level("memory", 3)};
  EXPECT_TRUE(is_told_apart(levels, 0) && is_told_apart(levels, 1) && is_told_apart(levels, 3));
  EXPECT_FALSE(is_told_apart(levels, 2));
}

TEST(Levels, TheFastestOfEachIsTakenUntilAllAreToldApart) {
  const std::vector<std::vector<double>> measured = {{9, 2, 3}, {5, 4, 1}, {99, 99, 99}};
  std::size_t count = 0;
  const auto measure = [&] {
    std::vector<measure::MemoryLevel> levels;
    for (const double speed : measured.at(count)) levels.push_back({.one_cpu = speed});
    ++count;
    return levels;
  };
  const auto speeds = [&] {
    count = 0;
    std::vector<double> found;
    for (const measure::MemoryLevel& level : fastest_of_measurements(measure)) found.push_back(level.one_cpu);
    return found;
  };
  EXPECT_EQ(speeds(), (std::vector<double>{9, 4, 3}));
  EXPECT_EQ(count, 2U);
}

TEST(Levels, ThreeMeasurementsAreTheMost) {
  int count = 0;
  const auto levels = fastest_of_measurements([&] {
    ++count;
    return std::vector<measure::MemoryLevel>{{.name = "L1", .one_cpu = 1}, {.name = "memory", .one_cpu = 2}};
  });
  EXPECT_EQ(count, 3);
  EXPECT_FALSE(is_told_apart(levels, 0));
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
        std::pair("## A\n@draw x\n", "expected @run STEP, @code FILE NAME [LAST] or @lines FILE FIRST ... LAST")}) {
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
            "holds: numbers are small\n");
  EXPECT_TRUE(stage.all_hold());
}

TEST(Stage, WhatWasPrintedBeforeAPictureIsItsText) {
  Stage stage({.ranks = 1});
  stage.print("A --> B");
  stage.show({Picture(10, 10, "from A to B")});
  stage.print("after");
  stage.check(true, "it is drawn");
  const std::vector<Block> blocks = stage.take_blocks();
  ASSERT_EQ(blocks.size(), 2U);
  EXPECT_EQ(blocks[0].text, "A --> B\n");
  EXPECT_EQ(blocks[0].pictures.size(), 1U);
  EXPECT_EQ(blocks[1].text, "after\nholds: it is drawn\n");
  EXPECT_TRUE(blocks[1].pictures.empty());
}

TEST(Flow, SaysWhatEachRankHoldsAndWhetherItIsTheSame) {
  Stage stage({.ranks = 2});
  Flow flow(2);
  stage.on_ranks(2, [&](Rank& rank) {
    flow.add(rank, "before", std::to_string(rank.number()));
    flow.add(rank, "sum", "1");
    flow.add(rank, "part", "a", at::full({1}, rank.number()));
    flow.add(rank, "whole", "a", at::full({1}, 5));
    rank.check(part_text(rank, at::full({4, 8}, 1), 8, 8) == (rank.number() == 0 ? "[0-3,all]" : "[4-7,all]"), "parts");
  });
  flow.show(stage, "a sum", /*compares=*/true);
  const std::vector<Block> blocks = stage.take_blocks();
  EXPECT_EQ(blocks.front().text,
            "        rank 0  rank 1\nbefore  0       1       different\nsum     1       1       equal\n"
            "part    a       a       different\nwhole   a       a       equal\n");
  ASSERT_EQ(blocks.front().pictures.size(), 1U);
  EXPECT_THAT(blocks.front().pictures[0].svg(),
              AllOf(HasSubstr("a sum"), HasSubstr("different"), HasSubstr("\"sum\"")));
  EXPECT_TRUE(stage.all_hold());
}

TEST(Timeline, DrawsWhatHappenedOnEachLane) {
  Stage stage({.ranks = 1});
  Timeline timeline({"one", "two"});
  const Timeline::Clock::time_point begin{};
  timeline.add(0, "call", "t0", begin, begin + std::chrono::milliseconds(24));
  timeline.add(1, "wait", "t1", begin + std::chrono::milliseconds(24), begin + std::chrono::milliseconds(48));
  timeline.show(stage, "both");
  EXPECT_EQ(timeline.run(1, "x", "t2", [] { return 3; }), 3);
  const std::vector<Block> blocks = stage.take_blocks();
  EXPECT_EQ(blocks.front().text, "both\n  one ~ |" + std::string(24, 'c') + std::string(24, '.') + "|\n  two ~ |" +
                                     std::string(24, '.') + std::string(24, 'w') + "|\n");
  EXPECT_THAT(blocks.front().pictures.at(0).svg(),
              AllOf(HasSubstr(">call</text>"), HasSubstr("both; ~48.0 ms in all")));
}

TEST(Stage, ACheckThatFailsOnOneRankDoesNotHold) {
  Stage stage({.ranks = 2});
  stage.on_ranks(2, [](Rank& rank) { rank.check(rank.number() == 0, "all are rank 0"); });
  EXPECT_EQ(stage.take_output(), "DOES NOT HOLD: all are rank 0\n");
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

TEST(Excerpt, TakesFromOneFunctionToAnother) {
  EXPECT_THAT(functions_of(kSource, "twice", "main", "a.cc"),
              AllOf(::testing::StartsWith("  // Doubles it.\n"), HasSubstr("};\nint main() {\n"),
                    ::testing::EndsWith("  g();\n}\n")));
  EXPECT_THAT(error_text<Error>([] { functions_of(kSource, "main", "twice", "a.cc"); }),
              HasSubstr("a.cc has 'main' after 'twice'"));
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
  EXPECT_EQ(html_of_markdown("```text\na < b\n\n# c\n```\n"), "<pre tabindex=0>a &lt; b\n\n# c\n</pre>\n");
  EXPECT_THAT(html_of_markdown("| a | b |\n| --- | --- |\n| 1 | 2 |\n"),
              AllOf(HasSubstr("<tr><th>a</th><th>b</th></tr>"), HasSubstr("<tr><td>1</td><td>2</td></tr>"),
                    Not(HasSubstr("---"))));
}

TEST(HtmlPage, LinksOnlyToTheWeb) {
  EXPECT_EQ(html_of_markdown("[a](https://x.org/y) [b](c.md)\n"), "<p><a href=\"https://x.org/y\">a</a> b\n</p>\n");
}

TEST(HtmlPage, ShowsPicturesInPlaceOfTheirText) {
  const WrittenSection written = write_section(*chosen_sections({"collectives"}).front(), {.ranks = 2});
  EXPECT_THAT(written.markdown, AllOf(HasSubstr("broadcast: one to all"), Not(HasSubstr("```picture"))));
  const std::string html = html_page({written});
  EXPECT_THAT(html, AllOf(HasSubstr("<div class=pictures><svg "), HasSubstr("broadcast: one to all</text>"),
                          Not(HasSubstr("A------&gt;A")), Not(HasSubstr("```"))));
  EXPECT_THAT(error_text<Error>([] { html_of_markdown("```picture 3\n```\n"); }), HasSubstr("no picture 3"));
}

TEST(Picture, IsAnSvgWithEscapedText) {
  Picture picture(100, 20, "a < b");
  picture.box({.x = 1, .y = 2, .width = 30, .height = 10}, "x & y", "t1");
  picture.arrow(0, 0, 10, 10);
  EXPECT_THAT(picture.svg(), AllOf(HasSubstr("viewBox=\"0 -22 100 42\""), HasSubstr("<title>a &lt; b</title>"),
                                   HasSubstr("<rect class=\"t1\" x=\"1.0\" y=\"2.0\" width=\"30.0\" height=\"10.0\""),
                                   HasSubstr(">x &amp; y</text>"), HasSubstr("d=\"M0.0 0.0L10.0 10.0\"")));
}

TEST(Picture, AStateWithoutZerosIsComplete) {
  const std::string svg = picture_of_state("step", {{"01", "11"}, {"11", "10"}}, {{0, 1, 0}, {1, 0, 1}}).svg();
  EXPECT_THAT(svg, AllOf(HasSubstr("class=\"sum\""), HasSubstr("class=\"plain\""), HasSubstr("marker-end")));
}

TEST(Picture, PartsThatAreThereButNotCurrentArePlain) {
  const std::string svg = picture_of_grid("a step", {"rank 0"}, {{"before", {"#o.|oo."}}}).svg();
  EXPECT_THAT(svg, AllOf(HasSubstr("class=\"t0\""), HasSubstr("class=\"plain\""), HasSubstr("class=\"wait\""),
                         Not(HasSubstr("#o"))));
}

TEST(Picture, BarsAreAsLongAsTheirShare) {
  const std::string svg = picture_of_bars("speeds", {{"a", 1, "9 GB/s"}, {"b", 0.5, "3 GB/s", "t1"}}).svg();
  EXPECT_THAT(svg, AllOf(HasSubstr("width=\"320.0\""), HasSubstr("class=\"t1\""), HasSubstr("width=\"160.0\""),
                         HasSubstr("9 GB/s")));
}

TEST(Tree, NoRankOfAnEvenNumberHasChildrenInBothTrees) {
  for (const int ranks : {2, 4, 6, 8, 16}) {
    const std::vector<Tree> trees = two_trees(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_TRUE(children_of(trees[0], rank) == 0 || children_of(trees[1], rank) == 0) << rank << " of " << ranks;
    }
  }
}

TEST(Tree, EveryRankButTheRootSendsOnceUpAndReceivesOnceDown) {
  for (const int ranks : {1, 2, 3, 4, 7, 8}) {
    for (const Tree& tree : two_trees(ranks)) {
      std::multiset<int> sent, received;
      for (int step = 1; step <= 2 * height_of(tree); ++step) {
        const bool up = step <= height_of(tree);
        for (const TreeEdge& edge : edges_of_step(tree, step)) up ? sent.insert(edge.from) : received.insert(edge.to);
      }
      for (int rank = 0; rank < ranks; ++rank) {
        const std::size_t expected = tree[static_cast<std::size_t>(rank)] < 0 ? 0 : 1;
        EXPECT_EQ(sent.count(rank), expected);
        EXPECT_EQ(received.count(rank), expected);
      }
    }
  }
}

TEST(HtmlPage, LoadsNothing) {
  const std::string page = html_page({{.section = sections().data(), .picture_markdown = "## A\n"}});
  EXPECT_THAT(page, AllOf(HasSubstr("default-src 'none'"), Not(HasSubstr("<script")), Not(HasSubstr("src="))));
  EXPECT_THAT(page, AllOf(HasSubstr("<a href=\"#why\">"), HasSubstr("<h1>Part 1: machines and messages</h1>")));
}

TEST(HtmlPage, EachPartHasItsHeadingOnce) {
  const Section &first = sections().front(), &last = sections().back();
  const std::string page = html_page({{.section = &first}, {.section = &first}, {.section = &last}});
  EXPECT_THAT(page, ::testing::ContainsRegex("id=\"why\".*\n.*id=\"why\".*\n.*<h1>Part 2: .*\n.*id=\"summary\""));
}

TEST(Lecture, ABenchmarkOfOneRankSaysWhatItNeeds) {
  const WrittenSection written = write_section(*chosen_sections({"benchmark"}).front(), {.ranks = 1});
  EXPECT_THAT(written.markdown, AllOf(HasSubstr("(needs two ranks)"), Not(HasSubstr("us; GB/s as estimate"))));
}

}  // namespace
}  // namespace phalanx::lecture
