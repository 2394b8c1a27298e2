#include "phalanx/report/report.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/svg.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/report/page_assets.h"

namespace phalanx::report {
namespace {

using nlohmann::json;

std::string replaced(std::string text, std::string_view part) {
  const std::size_t at = text.find(part);
  EXPECT_NE(at, std::string::npos);
  return at == std::string::npos ? text : text.erase(at, part.size());
}

/// What report.js draws.
json data_of(const std::string& html) {
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const std::size_t at = html.find(begin) + begin.size();
  return json::parse(html.substr(at, html.find("</script>", at) - at));
}

json chart_of(const std::string& html, const std::string& title) {
  const json data = data_of(html);
  for (const json& chart : data["charts"]) {
    if (chart["title"] == title) return chart;
  }
  return {{"series", json::array()}};
}

/// Nothing that a Content-Security-Policy would block or a browser would fetch; every text is in the page as embedded.
void expect_self_contained(const std::string& html) {
  std::string own = html;
  for (const auto* text : {&kUplotScript, &kReportScript})
    own = replaced(own, "<script>" + std::string(text->text) + "</script>");
  for (const auto* text : {&kUplotStyle, &kReportStyle})
    own = replaced(own, "<style>" + std::string(text->text) + "</style>");
  own = replaced(own, content_security_policy());
  // The scripts, the styles and the policy are out: what is left is markup and one block of data.
  const std::regex tags("<(script|style|img|link|iframe|object|embed|base|form|svg)\\b", std::regex::icase);
  EXPECT_EQ(std::distance(std::sregex_iterator(own.begin(), own.end(), tags), std::sregex_iterator()), 1);
  EXPECT_FALSE(std::regex_search(own, std::regex("<[^>]*\\s(on[a-z]+|style|src|href)\\s*=", std::regex::icase)));
  for (const std::string_view style : {kReportStyle.text, kUplotStyle.text}) {
    EXPECT_THAT(std::string(style), AllOf(Not(HasSubstr("url(")), Not(HasSubstr("@import"))));
  }
}

class ReportTest : public FolderTest {};

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
  const std::string html = read_file(file);
  EXPECT_THAT(html, HasSubstr("a &lt;b&gt; run"));
  EXPECT_THAT(html, HasSubstr(" upon &lt;a&gt; time"));
  EXPECT_THAT(html, HasSubstr("<b>2 of 3</b>"));
  EXPECT_THAT(html, HasSubstr("<b>7.2500</b><span>validation loss"));
  EXPECT_THAT(html, HasSubstr("<b>64</b><span>tokens/s, all ranks"));
  EXPECT_THAT(html, HasSubstr("rank 1"));
  EXPECT_THAT(html, HasSubstr("steps = 3"));
  // Only the policy's name and uPlot's banner look like an address.
  EXPECT_THAT(std::regex_replace(html, std::regex("http-equiv|https://github.com/leeoniya/uPlot"), ""),
              Not(HasSubstr("http")));
  expect_self_contained(html);
}

TEST_F(ReportTest, EachChartAndNumberIsOfItsKey) {
  write("run.json", R"({"steps": 2, "unigram_entropy": 5.125})");
  write("metrics.jsonl",
        "{\"step\":1,\"loss\":9.0,\"grad_norm\":1.5,\"lr\":0.25,\"tps\":100,\"tokens\":5000,\"seconds\":3000}\n"
        "{\"step\":2,\"loss\":8.0,\"grad_norm\":1.75,\"lr\":0.5,\"tps\":200,\"tokens\":5000,\"seconds\":725}\n"
        "{\"step\":2,\"validation_loss\":2.0}\n");
  const std::string html = render_report(folder());
  const auto points = [&](const std::string& title, std::size_t series) {
    const json one = chart_of(html, title)["series"].at(series);
    return one["x"].dump() + one["y"].dump();
  };
  EXPECT_EQ(points("Loss", 0), "[1,2][9.0,8.0]");
  EXPECT_EQ(points("Loss", 1), "[2][2.0]");
  EXPECT_EQ(points("Learning rate", 0), "[1,2][0.25,0.5]");
  EXPECT_EQ(points("Gradient norm", 0), "[1,2][1.5,1.75]");
  EXPECT_EQ(points("Throughput", 0), "[1,2][100.0,200.0]");
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
  EXPECT_EQ(chart_of(html, "Loss")["series"][0]["y"], json({9.0, 8.25}));
}

TEST_F(ReportTest, ALineThatIsStillBeingWrittenIsLeftOut) {
  write("run.json", kRun);
  write("metrics.jsonl", "{\"step\":1,\"loss\":9.0}\n{\"step\":2,\"lo");
  EXPECT_THAT(render_report(folder()), HasSubstr("9.0000"));
}

TEST_F(ReportTest, MissingOrMalformedFilesAreNamed) {
  const auto refusal = [&] { return error_text<DataError>([&] { render_report(folder()); }); };
  EXPECT_THAT(refusal(), HasSubstr("run.json"));
  write("run.json", "[1]");
  EXPECT_THAT(refusal(), HasSubstr("not a JSON object"));
  write("run.json", kRun);
  EXPECT_THAT(refusal(), HasSubstr("metrics.jsonl"));
  write("metrics.jsonl", "{\"step\":1,\"loss\":9.0}\nnonsense\n{\"step\":2,\"loss\":9.0}\n");
  EXPECT_THAT(refusal(), HasSubstr("metrics.jsonl:2:"));
}

TEST_F(ReportTest, EveryFigureSaysItsUnit) {
  write("run.json", R"({"steps": 2, "unigram_entropy": 5.125, "parameters": 7})");
  write("metrics.jsonl",
        "{\"step\":1,\"loss\":9.0,\"grad_norm\":1.5,\"lr\":0.25,\"tps\":100,\"tokens\":5000,\"seconds\":3,"
        "\"memory_gib\":[1],\"mfu_percent\":5,\"exposed_percent\":6,\"expert_load\":[1.5,1.25],\"expert_load_max\":1.5,"
        "\"expert_load_mean\":1.375}\n{\"step\":1,\"validation_loss\":2.0}\n");
  const std::string html = render_report(folder());
  const json charts = data_of(html)["charts"];
  EXPECT_THAT(charts, SizeIs(8));
  const json load = chart_of(html, "Load of experts")["series"];
  ASSERT_THAT(load, SizeIs(2));
  EXPECT_EQ(load[0]["name"], "most uneven layer");
  EXPECT_EQ(load[0]["y"], json({1.5}));
  EXPECT_EQ(load[1]["y"], json({1.375}));
  for (const json& chart : charts) {
    EXPECT_NE(chart["unit"], "") << chart["title"];
    EXPECT_THAT(html, HasSubstr(fmt::format("<figcaption>{} <small>{}</small>", chart["title"].get<std::string>(),
                                            escape_markup(chart["unit"].get<std::string>()))));
  }
  for (const char* name : {"steps", "training loss, nats per token", "validation loss, nats per token",
                           "validation perplexity, no unit", "unigram entropy of the validation text, nats per token",
                           "tokens", "tokens/s, all ranks", "time in steps", "parameters"}) {
    EXPECT_THAT(html, HasSubstr(fmt::format("<span>{}</span>", name)));
  }
}

TEST_F(ReportTest, LossesOfPairsSaySo) {
  write("run.json", R"({"steps": 2, "loss_unit": "nats per pair"})");
  write("metrics.jsonl", "{\"step\":1,\"loss\":0.7}\n");
  EXPECT_EQ(chart_of(render_report(folder()), "Loss")["unit"], "nats per pair");
}

TEST_F(ReportTest, ALongCurveIsThinnedAndThePageSaysSo) {
  write("run.json", kRun);
  std::string lines;
  for (int step = 1; step <= 10'000; ++step)
    lines += fmt::format("{{\"step\":{},\"loss\":{}}}\n", step, step == 7'777 ? 99 : 2 + step % 7);
  write("metrics.jsonl", lines);
  const std::string html = render_report(folder());
  const json series = chart_of(html, "Loss")["series"];
  ASSERT_THAT(series, SizeIs(2));
  EXPECT_EQ(series[0]["name"], "train, each step");
  EXPECT_EQ(series[1]["name"], "train, mean of 101 steps");
  EXPECT_LE(series[0]["x"].size(), 2'002U);
  EXPECT_THAT(series[0]["y"].get<std::vector<double>>(), Contains(99));
  EXPECT_THAT(html,
              HasSubstr("10,000 steps, of which the lowest and the highest value of each 10 adjacent ones are drawn"));
  EXPECT_THAT(html, HasSubstr("the mean of the steps around each"));
}

TEST_F(ReportTest, ValuesThatAreNotFiniteAreGapsAndCounted) {
  write("run.json", kRun);
  write("metrics.jsonl", "{\"step\":1,\"loss\":9}\n{\"step\":2,\"loss\":NaN}\n{\"step\":3,\"loss\":null}\n");
  const std::string html = render_report(folder());
  EXPECT_EQ(chart_of(html, "Loss")["series"][0]["y"], json({9.0, nullptr, nullptr}));
  EXPECT_THAT(html,
              HasSubstr("train: 2 steps without a finite value (NaN, infinity or skipped), marked × at the bottom"));
  EXPECT_THAT(html, HasSubstr("<b>not finite</b><span>training loss"));
}

TEST_F(ReportTest, ARunWithoutStepsIsAPageThatSaysSo) {
  write("run.json", "{}");
  write("metrics.jsonl", "");
  const std::string html = render_report(folder());
  EXPECT_THAT(html, HasSubstr("metrics.jsonl has no training step yet"));
  EXPECT_THAT(html, HasSubstr("no values in metrics.jsonl"));
  EXPECT_THAT(html, HasSubstr("<h1>Phalanx training</h1>"));
  expect_self_contained(html);
}

TEST_F(ReportTest, ResumesAndLayoutChangesAreMarkedAndListed) {
  write("run.json", R"({"begun": {"layout": "2 ranks"}, "history": [
    {"step": 2, "layout": "1 rank", "time": 1764093600.0, "changes": [{"key": "[optimizer] lr", "saved": 1, "now": 2}]},
    {"step": 9, "layout": "3 ranks", "changes": []}, {"step": 3, "layout": "1 rank", "changes": []}]})");
  write("metrics.jsonl", "{\"step\":1,\"loss\":9}\n{\"step\":4,\"loss\":8}\n");
  const std::string html = render_report(folder());
  EXPECT_EQ(data_of(html)["runs"][0]["marks"], json::parse(R"([{"step": 2, "layout": true,
      "text": "resumed after step 2; layout: 2 ranks → 1 rank; [optimizer] lr: 1 → 2"},
      {"step": 3, "layout": false, "text": "resumed after step 3; layout: 1 rank, as before"}])"));
  EXPECT_THAT(html,
              HasSubstr("<td>2</td><td>◆ layout changed</td><td>2 ranks → 1 rank</td><td>[optimizer] lr: 1 → 2</td>"
                        "<td>2025-11-25 18:00:00 UTC</td>"));
  EXPECT_THAT(html, HasSubstr("<td>9</td><td>◆ layout changed: later undone: not on the charts</td>"));
}

TEST_F(ReportTest, HostileTextsStayTexts) {
  const std::string evil = "</script><img src=x onerror=alert(1)><!--<script>\"'&";
  const json run = {
      {"description", evil},
      {"status", evil},
      {"layout", evil},
      {"model", evil},
      {"config", "[a]\nb = " + evil},
      {"environment", {{evil, evil}}},
      {"sample", {{"prompt", evil}, {"text", evil + "\xff"}}},
      {"begun", {{"layout", "x"}}},
      {"history", {{{"step", 1}, {"layout", evil}, {"changes", {{{"key", evil}, {"saved", evil}, {"note", evil}}}}}}}};
  for (const std::string& name : {std::string("a <img src=x onerror=alert(1)>"), std::string("b")}) {
    std::filesystem::create_directory(path(name));
    write(name + "/run.json", run.dump(-1, ' ', false, json::error_handler_t::replace));
    write(name + "/metrics.jsonl",
          "{\"step\":1,\"loss\":9}\n{\"step\":2,\"loss\":\""
          "</script>"
          "\"}\n");
  }
  const std::string one = render_report(path("b"));
  const std::string two = render_comparison({path("a <img src=x onerror=alert(1)>"), path("b")});
  for (const std::string& html : {one, two}) {
    expect_self_contained(html);
    EXPECT_THAT(html, Not(HasSubstr("<img")));
    EXPECT_THAT(html, HasSubstr("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;"));
  }
  EXPECT_EQ(data_of(two)["runs"][0]["name"], "a <img src=x onerror=alert(1)>");
}

class ComparisonTest : public ReportTest {
 protected:
  std::string make_run(const std::string& name, const json& run, const std::string& metrics) {
    std::filesystem::create_directory(path(name));
    write(name + "/run.json", run.dump());
    write(name + "/metrics.jsonl", metrics);
    return path(name);
  }
};

TEST_F(ComparisonTest, EachRunHasALineAndAColourInEveryChart) {
  const std::string a =
      make_run("a", {{"description", "first"}, {"config", "[optimizer]\nlr = 0.1\nname = \"x\"\n"}},
               "{\"step\":1,\"loss\":9,\"lr\":1,\"memory_gib\":[1,3]}\n{\"step\":1,\"validation_loss\":5}\n");
  const std::string b = make_run(
      "b", {{"config", "[optimizer]\nlr = 0.2\nname = \"x\"\nnew = 1\n"}, {"environment", {{"device", "cpu"}}}},
      "{\"step\":1,\"loss\":8,\"memory_gib\":[2]}\n");
  const std::string file = path("both.html");
  write_comparison({a, b}, file);
  const std::string html = read_file(file);
  expect_self_contained(html);
  const json loss = chart_of(html, "Training loss")["series"];
  ASSERT_THAT(loss, SizeIs(2));
  EXPECT_EQ(loss[0]["run"], 0);
  EXPECT_EQ(loss[1]["run"], 1);
  EXPECT_EQ(loss[1]["color"], 1);
  EXPECT_EQ(loss[1]["y"], json({8.0}));
  EXPECT_EQ(chart_of(html, "Memory of the fullest rank")["series"][0]["y"], json({3.0}));
  EXPECT_THAT(chart_of(html, "Validation loss")["series"], SizeIs(1));
  EXPECT_THAT(html, HasSubstr("<li>b: no values</li>"));
  EXPECT_EQ(data_of(html)["runs"][1]["name"], "b");

  EXPECT_THAT(html, HasSubstr("<tr><th scope=\"row\">optimizer.lr</th><td>0.1</td><td>0.2</td></tr>"));
  EXPECT_THAT(html,
              HasSubstr("<tr><th scope=\"row\">optimizer.new</th><td class=\"none\">not there</td><td>1</td></tr>"));
  EXPECT_THAT(html, Not(HasSubstr("optimizer.name")));
  EXPECT_THAT(html, HasSubstr("<tr><th scope=\"row\">device</th><td class=\"none\">not there</td><td>cpu</td></tr>"));
  EXPECT_THAT(html, HasSubstr("<tr><th scope=\"row\">title</th><td>first</td><td>Phalanx training</td></tr>"));
}

TEST_F(ComparisonTest, RunsOfOneConfigurationSaySo) {
  const std::string a = make_run("a", json::object(), ""), b = make_run("b", json::object(), "");
  const std::string html = render_comparison({a, b});
  EXPECT_THAT(html, HasSubstr("The runs have the same configuration."));
  EXPECT_THAT(html, HasSubstr("<li>a: metrics.jsonl has no training step yet</li>"));
}

TEST_F(ComparisonTest, ARunWithoutMetricsIsNamedAndTheOthersAreShown) {
  const std::string a = make_run("a", {{"description", "first"}}, ""), b = make_run("b", json::object(), "");
  write("b/metrics.jsonl", "{\"step\":1,\"loss\":8}\n");
  std::filesystem::remove(path("a/metrics.jsonl"));
  for (const std::vector<std::string>& folders : {std::vector{a, b}, std::vector{b, a}}) {
    const std::string html = render_comparison(folders);
    EXPECT_THAT(html, HasSubstr("<li>a: it has no metrics.jsonl, so no curves</li>"));
    EXPECT_THAT(html, HasSubstr("<tr><th scope=\"row\">title</th>"));
    EXPECT_EQ(chart_of(html, "Training loss")["series"][0]["y"], json({8.0}));
  }
  std::filesystem::remove(path("b/metrics.jsonl"));
  EXPECT_THAT(error_text<DataError>([&] { render_comparison({a, b}); }), HasSubstr("a/metrics.jsonl"));
}

TEST_F(ComparisonTest, WrongFoldersAreRefused) {
  const std::string a = make_run("a", json::object(), "");
  EXPECT_THAT(error_text<UsageError>([&] { render_comparison({a, a + "/../a/"}); }), HasSubstr("is named twice"));
  EXPECT_THAT(error_text<DataError>([&] { render_comparison({a, path("none")}); }), HasSubstr("none' does not exist"));
  EXPECT_THAT(error_text<UsageError>([&] { render_comparison(std::vector<std::string>(17, a)); }),
              HasSubstr("17 runs in one report: expected at most 16"));
}

}  // namespace
}  // namespace phalanx::report
