// Renders a line chart as one inline SVG element, readable without scripts. The script of report.h adds a read-out
// under the pointer.
//
//   std::string svg = render_chart({.title = "Loss", .series = {{.name = "train", .points = points}}});
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace phalanx::train {

using Points = std::vector<std::pair<double, double>>;  // by rising x; non-finite values are left out

struct Series {
  std::string name;
  std::string color = "#2563eb";
  Points points;
  bool faint = false;    // thin and pale: raw values behind a smoothed line
  bool markers = false;  // a dot at every point
};

struct Chart {
  std::string title;
  std::string unit;  // behind the title, in grey
  std::vector<Series> series;
  bool from_zero = false;  // the y axis starts at 0
  bool wide = false;       // twice as wide as the others
};

std::string render_chart(const Chart& chart);

/// At most `limit` points: each is the mean of a run of adjacent points.
Points thinned(const Points& points, std::size_t limit);
/// Exponential moving average, bias-corrected, over about `window` points.
Points smoothed(const Points& points, double window);

/// Positions of axis labels: multiples of 1, 2 or 5 times a power of ten, `about` of them, inside [low, high].
std::vector<double> axis_ticks(double low, double high, int about);

}  // namespace phalanx::train
