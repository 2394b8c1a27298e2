#include "phalanx/report/page_charts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "phalanx/base/human.h"
#include "phalanx/base/svg.h"

namespace phalanx::report {
namespace {

constexpr std::size_t kFewPoints = 60;  // up to here a curve is not smoothed, and shows its points

/// A chart of one key of the training steps.
struct StepChart {
  const char* key;
  const char* title;
  const char* unit;
  bool smooth = false, can_be_log = false, from_zero = false, is_optional = false;
};

constexpr StepChart kLearningRate{.key = "lr",
                                  .title = "Learning rate",
                                  .unit = "factor of the update, no unit",
                                  .can_be_log = true,
                                  .from_zero = true};
constexpr StepChart kGradientNorm{.key = "grad_norm",
                                  .title = "Gradient norm",
                                  .unit = "before clipping, no unit",
                                  .smooth = true,
                                  .can_be_log = true,
                                  .from_zero = true};
constexpr StepChart kThroughput{
    .key = "tps", .title = "Throughput", .unit = "tokens/s of one device", .smooth = true, .from_zero = true};
constexpr StepChart kUtilisation{.key = "mfu_percent",
                                 .title = "Model FLOP utilisation",
                                 .unit = "% of the device's peak",
                                 .smooth = true,
                                 .from_zero = true,
                                 .is_optional = true};
constexpr StepChart kExposed{.key = "exposed_percent",
                             .title = "Exposed communication",
                             .unit = "% of the step",
                             .smooth = true,
                             .from_zero = true,
                             .is_optional = true};

/// About a hundred and fiftieth of the curve: 11, 21, 51, 101, ... steps.
std::size_t smoothing_window(const Curve& curve) {
  return static_cast<std::size_t>(round_step(std::max(8.0, static_cast<double>(curve.steps.size()) / 150))) + 1;
}

/// The curve itself and, if asked for and it is long enough, its mean. `name` goes before both names.
void add_series(PageChart& chart, ChartSeries series, const Curve& curve, bool smooth) {
  if (curve.empty()) return;
  const bool is_long = curve.steps.size() > kFewPoints;
  const std::string name = series.name.empty() ? "" : series.name + ", ";
  const bool with_mean = smooth && is_long;
  if (series.name.empty() || with_mean) series.name = name + "each step";
  series.curve = drawn_curve(curve);
  series.faint = with_mean;
  series.dots = !is_long && !smooth;
  chart.series.push_back(series);
  if (!with_mean) return;
  const std::size_t window = smoothing_window(curve);
  series.name = fmt::format("{}mean of {} steps", name, with_commas(static_cast<std::int64_t>(window)));
  series.curve = drawn_curve(moving_mean(curve, window));
  series.faint = false;
  series.is_mean = true;
  chart.series.push_back(std::move(series));
}

void say_what_is_drawn(PageChart& chart, const std::vector<RunFolder>& runs) {
  std::vector<bool> has_values(runs.size(), false), said(runs.size(), false);
  bool has_mean = false;
  for (const ChartSeries& series : chart.series) {
    const std::string who = runs.size() > 1 ? runs[series.run].name + ": " : "";
    has_mean = has_mean || series.is_mean;
    has_values[series.run] = true;
    if (series.curve.group_size > 1 && !said[series.run]) {
      said[series.run] = true;
      chart.notes.push_back(fmt::format(
          "{}{} steps, of which the lowest and the highest value of each {} adjacent ones are drawn (zoomed in, too)",
          who, with_commas(static_cast<std::int64_t>(series.curve.of)),
          with_commas(static_cast<std::int64_t>(series.curve.group_size))));
    }
    if (series.curve.not_finite > 0 && !series.is_mean) {
      chart.notes.push_back(
          fmt::format("{}{}: {} step{} without a finite value (NaN, infinity or skipped), marked × at the "
                      "bottom, with a gap in the line",
                      who, series.name, with_commas(static_cast<std::int64_t>(series.curve.not_finite)),
                      series.curve.not_finite == 1 ? "" : "s"));
    }
  }
  if (has_mean) chart.notes.emplace_back("pale lines: each step; strong lines: the mean of the steps around each");
  for (std::size_t run = 0; run < runs.size(); ++run) {
    if (!chart.series.empty() && !has_values[run]) chart.notes.push_back(runs[run].name + ": no values");
  }
}

PageChart step_chart(const StepChart& kind, const std::vector<RunFolder>& runs) {
  PageChart chart{.title = kind.title, .unit = kind.unit, .can_be_log = kind.can_be_log, .from_zero = kind.from_zero};
  for (std::size_t run = 0; run < runs.size(); ++run) {
    add_series(chart, {.run = run, .color = run}, runs[run].metrics.curve(kind.key), kind.smooth);
  }
  return chart;
}

/// Of all runs; where they differ, each of their units.
std::string loss_unit_of(const std::vector<RunFolder>& runs) {
  std::set<std::string> units;
  for (const RunFolder& run : runs) units.insert(run.loss_unit());
  return fmt::format("{}", fmt::join(units, " or "));
}

PageChart loss_chart(const std::vector<RunFolder>& runs) {
  PageChart chart{.title = "Loss", .unit = loss_unit_of(runs), .can_be_log = true, .wide = true};
  const bool is_alone = runs.size() == 1;
  if (!is_alone) chart.title = "Training loss";
  for (std::size_t run = 0; run < runs.size(); ++run) {
    add_series(chart, {.run = run, .color = run, .name = is_alone ? "train" : ""}, runs[run].metrics.curve("loss"),
               /*smooth=*/true);
  }
  if (is_alone) {
    add_series(chart, {.color = 1, .name = "validation"}, runs[0].metrics.validation_loss, /*smooth=*/false);
  }
  return chart;
}

PageChart validation_chart(const std::vector<RunFolder>& runs) {
  PageChart chart{.title = "Validation loss", .unit = loss_unit_of(runs), .can_be_log = true, .wide = true};
  for (std::size_t run = 0; run < runs.size(); ++run) {
    add_series(chart, {.run = run, .color = run, .name = "validation"}, runs[run].metrics.validation_loss,
               /*smooth=*/false);
  }
  return chart;
}

PageChart memory_chart(const std::vector<RunFolder>& runs) {
  PageChart chart{.title = "Memory of each rank", .unit = "GiB, peak", .from_zero = true};
  const MetricsFile& first = runs[0].metrics;
  if (runs.size() > 1) {
    chart.title = "Memory of the fullest rank";
    for (std::size_t run = 0; run < runs.size(); ++run) {
      add_series(chart, {.run = run, .color = run}, runs[run].metrics.memory_highest, /*smooth=*/false);
    }
  } else if (first.memory_by_rank.empty()) {
    chart.title = "Memory of the ranks";
    add_series(chart, {.name = "fullest rank"}, first.memory_highest, /*smooth=*/false);
    add_series(chart, {.color = 1, .name = "emptiest rank"}, first.memory_lowest, /*smooth=*/false);
  } else {
    for (std::size_t rank = 0; rank < first.memory_by_rank.size(); ++rank) {
      add_series(chart, {.color = rank, .name = fmt::format("rank {}", rank)}, first.memory_by_rank[rank],
                 /*smooth=*/false);
    }
  }
  return chart;
}

/// Of logged steps.
PageChart expert_chart(const std::vector<RunFolder>& runs) {
  PageChart chart{.title = "Load of experts", .unit = "tokens of the fullest expert by the mean; 1 is even"};
  for (std::size_t run = 0; run < runs.size(); ++run) {
    const bool is_alone = runs.size() == 1;
    add_series(chart, {.run = run, .color = run, .name = "most uneven layer"},
               runs[run].metrics.curve("expert_load_max"), /*smooth=*/false);
    if (!is_alone) continue;
    add_series(chart, {.color = 1, .name = "mean of the layers"}, runs[run].metrics.curve("expert_load_mean"),
               /*smooth=*/false);
  }
  return chart;
}

nlohmann::json six_digits(double value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(fmt::format("{:.6g}", value).c_str(), nullptr);
}

nlohmann::json series_data(const ChartSeries& series) {
  nlohmann::json values = nlohmann::json::array();
  for (const double value : series.curve.points.values) values.push_back(six_digits(value));
  return {{"run", series.run},
          {"color", series.color},
          {"name", series.name},
          {"faint", series.faint},
          {"mean", series.is_mean},
          {"dots", series.dots},
          {"x", series.curve.points.steps},
          {"y", std::move(values)}};
}

}  // namespace

std::vector<PageChart> page_charts(const std::vector<RunFolder>& runs) {
  std::vector<PageChart> charts = {loss_chart(runs)};
  const auto add_if_any = [&](PageChart chart) {
    if (!chart.series.empty()) charts.push_back(std::move(chart));
  };
  if (runs.size() > 1) add_if_any(validation_chart(runs));
  for (const StepChart& kind : {kLearningRate, kGradientNorm, kThroughput}) charts.push_back(step_chart(kind, runs));
  charts.push_back(memory_chart(runs));
  for (const StepChart& kind : {kUtilisation, kExposed}) add_if_any(step_chart(kind, runs));
  add_if_any(expert_chart(runs));
  for (PageChart& chart : charts) say_what_is_drawn(chart, runs);
  return charts;
}

nlohmann::json page_data(const std::vector<RunFolder>& runs, const std::vector<PageChart>& charts) {
  nlohmann::json data = {{"runs", nlohmann::json::array()}, {"charts", nlohmann::json::array()}};
  for (const RunFolder& run : runs) {
    nlohmann::json marks = nlohmann::json::array();
    for (const RunMark& mark : run.marks.marks) {
      if (mark.on_curve) marks.push_back({{"step", mark.step}, {"layout", mark.layout_changed}, {"text", mark.text()}});
    }
    data["runs"].push_back({{"name", run.name}, {"marks", std::move(marks)}});
  }
  for (const PageChart& chart : charts) {
    nlohmann::json series = nlohmann::json::array();
    for (const ChartSeries& one : chart.series) series.push_back(series_data(one));
    data["charts"].push_back({{"title", chart.title},
                              {"unit", chart.unit},
                              {"log", chart.can_be_log},
                              {"zero", chart.from_zero},
                              {"series", std::move(series)}});
  }
  return data;
}

std::string chart_figure(const PageChart& chart, std::size_t index) {
  std::string html =
      fmt::format("<figure{} data-chart=\"{}\"><figcaption>{} <small>{}</small></figcaption>",
                  chart.wide ? " class=\"wide\"" : "", index, escape_markup(chart.title), escape_markup(chart.unit));
  html += chart.series.empty() ? "<p class=\"empty\">no values in metrics.jsonl</p>" : "<div class=\"plot\"></div>";
  std::string notes;
  for (const std::string& note : chart.notes) notes += fmt::format("<li>{}</li>", escape_markup(note));
  if (!notes.empty()) html += fmt::format("<ul class=\"notes\">{}</ul>", notes);
  return html + "</figure>";
}

}  // namespace phalanx::report
