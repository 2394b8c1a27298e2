#include "phalanx/report/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/report/chart.h"

namespace phalanx::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class ReportTest : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) { std::ofstream(path(name)) << text; }
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  std::string folder() const { return folder_.path().string(); }

 private:
  TempDirectory folder_;
};

constexpr const char* kRun = R"({"description": "a <b> run", "status": "finished", "steps": 3, "parameters": 5000000,
  "config": "[training]\nsteps = 3\n", "environment": {"device": "cpu"},
  "sample": {"prompt": "Once", "text": " upon <a> time"}})";

TEST_F(ReportTest, ShowsTheRunInOneFileWithoutTheNetwork) {
  write("run.json", kRun);
  write("metrics.jsonl",
        "{\"step\":1,\"loss\":9.0,\"grad_norm\":1.0,\"lr\":0.1,\"tps\":100,\"tokens\":64,\"seconds\":1,\"memory_gib\":["
        "0.5,0.6]}\n"
        "{\"step\":2,\"loss\":8.0,\"grad_norm\":1.0,\"lr\":0.1,\"tps\":100,\"tokens\":64,\"seconds\":1,\"memory_gib\":["
        "0.5,0.6]}\n"
        "{\"step\":2,\"validation_loss\":7.25}\n");
  const std::string file = write_report(folder());
  EXPECT_EQ(file, path("report.html"));
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  const std::string html = text.str();
  EXPECT_THAT(html, HasSubstr("a &lt;b&gt; run"));
  EXPECT_THAT(html, HasSubstr(" upon &lt;a&gt; time"));
  EXPECT_THAT(html, HasSubstr("<b>2 of 3</b>"));
  EXPECT_THAT(html, HasSubstr("<b>7.2500</b><span>validation loss"));
  EXPECT_THAT(html, HasSubstr("<b>64</b><span>tokens/s, all ranks"));
  EXPECT_THAT(html, HasSubstr("rank 1"));
  EXPECT_THAT(html, HasSubstr("steps = 3"));
  // Only the SVG namespace's name looks like an address.
  EXPECT_THAT(std::regex_replace(html, std::regex("http://www.w3.org/2000/svg"), ""), Not(HasSubstr("http")));
}

TEST_F(ReportTest, EachChartAndNumberIsOfItsKey) {
  write("run.json", R"({"steps": 2, "unigram_entropy": 5.125})");
  write("metrics.jsonl",
        "{\"step\":1,\"loss\":9.0,\"grad_norm\":1.5,\"lr\":0.25,\"tps\":100,\"tokens\":5000,\"seconds\":3000}\n"
        "{\"step\":2,\"loss\":8.0,\"grad_norm\":1.75,\"lr\":0.5,\"tps\":200,\"tokens\":5000,\"seconds\":725}\n"
        "{\"step\":2,\"validation_loss\":2.0}\n");
  const std::string html = render_report(folder());
  const auto chart = [&](const std::string& title) {
    const std::size_t begin = html.find("<figcaption>" + title);
    return std::regex_replace(html.substr(begin, html.find("</figure>", begin) - begin), std::regex("&quot;"), "\"");
  };
  EXPECT_THAT(chart("Loss"), HasSubstr("\"points\":[[1.0,9.0],[2.0,8.0]]"));
  EXPECT_THAT(chart("Loss"), HasSubstr("\"points\":[[2.0,2.0]]"));
  EXPECT_THAT(chart("Learning rate"), HasSubstr("[[1.0,0.25],[2.0,0.5]]"));
  EXPECT_THAT(chart("Gradient norm"), HasSubstr("[[1.0,1.5],[2.0,1.75]]"));
  EXPECT_THAT(chart("Throughput"), HasSubstr("[[1.0,100.0],[2.0,200.0]]"));
  EXPECT_THAT(html, HasSubstr("<b>7.39</b><span>validation perplexity"));  // e^2
  EXPECT_THAT(html, HasSubstr("<b>5.1250</b><span>unigram entropy"));
  EXPECT_THAT(html, HasSubstr("<b>10,000</b><span>tokens</span>"));
  EXPECT_THAT(html, HasSubstr("<b>1 h 02 min</b><span>time in steps"));
  write("metrics.jsonl", "{\"step\":1,\"loss\":9.0,\"tokens\":5000,\"seconds\":125}\n");
  EXPECT_THAT(render_report(folder()), HasSubstr("<b>2 min 05 s</b><span>time in steps"));
}

TEST_F(ReportTest, LaterLinesOfAResumedRunReplaceEarlierOnes) {
  write("run.json", kRun);
  write("metrics.jsonl", "{\"step\":1,\"loss\":9.0}\n{\"step\":2,\"loss\":8.5}\n{\"step\":2,\"loss\":8.25}\n");
  const std::string html = render_report(folder());
  EXPECT_THAT(html, HasSubstr("8.2500"));
  EXPECT_THAT(html, Not(HasSubstr("[2.0,8.5]")));
}

TEST_F(ReportTest, ALineThatIsStillBeingWrittenIsLeftOut) {
  write("run.json", kRun);
  write("metrics.jsonl", "{\"step\":1,\"loss\":9.0}\n{\"step\":2,\"lo");
  EXPECT_THAT(render_report(folder()), HasSubstr("9.0000"));
}

TEST_F(ReportTest, MissingOrMalformedFilesAreNamed) {
  const auto refusal = [&] {
    try {
      render_report(folder());
    } catch (const DataError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refusal(), HasSubstr("run.json"));
  write("run.json", "[1]");
  EXPECT_THAT(refusal(), HasSubstr("not a JSON object"));
  write("run.json", kRun);
  EXPECT_THAT(refusal(), HasSubstr("metrics.jsonl"));
  write("metrics.jsonl", "{\"step\":1,\"loss\":9.0}\nnonsense\n{\"step\":2,\"loss\":9.0}\n");
  EXPECT_THAT(refusal(), HasSubstr("metrics.jsonl:2:"));
}

TEST(Chart, TicksAreRoundNumbers) {
  EXPECT_THAT(axis_ticks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(axis_ticks(3.1, 8.4, 5), ElementsAre(4, 6, 8));
}

TEST(Chart, LeavesOutWhatIsNotFinite) {
  const std::string svg = render_chart({.title = "t", .series = {{.name = "s", .points = {{1, 2}, {2, NAN}, {3, 4}}}}});
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(render_chart({.title = "t", .series = {{.name = "s"}}}), HasSubstr("no values"));
}

TEST(Chart, LargerValuesAreHigherAndLaterStepsFurtherRight) {
  const std::string svg = render_chart({.title = "t", .series = {{.name = "s", .points = {{10, 2}, {20, 4}}}}});
  std::smatch path;
  ASSERT_TRUE(std::regex_search(svg, path, std::regex("d=\"M([0-9.]+) ([0-9.]+)L([0-9.]+) ([0-9.]+)\"")));
  EXPECT_EQ(path[1], "56.0");   // the frame's left edge
  EXPECT_EQ(path[3], "626.0");  // and its right one: SVG counts downwards
  EXPECT_GT(std::stod(path[2]), std::stod(path[4]));
}

TEST(Chart, ThinningKeepsTheMean) {
  Points points;
  for (int i = 0; i < 100; ++i) points.emplace_back(i, 2.0 * i);
  const Points thin = thinned(points, 10);
  ASSERT_EQ(thin.size(), 10U);
  EXPECT_DOUBLE_EQ(thin[0].second, 9.0);
  EXPECT_DOUBLE_EQ(thin[9].first, 94.5);
  EXPECT_DOUBLE_EQ(smoothed({{1, 5}, {2, 5}, {3, 5}}, 10)[2].second, 5.0);
}

}  // namespace
}  // namespace phalanx::train
