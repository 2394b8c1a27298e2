// The charts of a report page: the data that page/report.js draws, and what the page says about each chart in words.
//
// In a page of one run every curve has a colour. In a page of several runs every run has one.
//
//   const auto charts = page_charts(runs);
//   html += chart_figure(charts[0], 0);        // holds the element that the script fills
//   const std::string data = page_data(runs, charts).dump();
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "phalanx/report/drawn_curve.h"
#include "phalanx/report/run_folder.h"

namespace phalanx::report {

struct ChartSeries {
  std::size_t run = 0;    // whose curve this is
  std::size_t color = 0;  // index into the palette of page/report.css, from where it repeats
  std::string name;
  DrawnCurve curve;
  bool faint = false;    // thin and pale: the values behind their mean
  bool is_mean = false;  // the mean of the series before it
  bool dots = false;     // a dot at every point
};

struct PageChart {
  std::string title;
  std::string unit;
  std::vector<ChartSeries> series;
  bool can_be_log = false;  // has a switch for a logarithmic axis
  bool from_zero = false;   // the linear axis starts at 0
  bool wide = false;        // as wide as the page
  std::vector<std::string> notes;
};

/// A chart of which no run has values is there only if every version of Phalanx writes them.
std::vector<PageChart> page_charts(const std::vector<RunFolder>& runs);

/// {"runs": [{"name", "marks": [{"step", "layout", "text"}]}],
///  "charts": [{"title", "unit", "log", "zero",
///              "series": [{"run", "color", "name", "faint", "mean", "dots", "x": [...], "y": [...]}]}]}
/// "x" are steps. null in "y" is a step without a finite value. Values have six significant digits.
nlohmann::json page_data(const std::vector<RunFolder>& runs, const std::vector<PageChart>& charts);

std::string chart_figure(const PageChart& chart, std::size_t index);

}  // namespace phalanx::report
