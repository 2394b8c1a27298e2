#include "phalanx/report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "phalanx/base/svg.h"

namespace phalanx::train {
namespace {

constexpr double kLeft = 56, kRight = 14, kTop = 12, kBottom = 30;

std::string label_text(double value, double step) {
  const double size = std::max(std::abs(value), step);
  if (value == 0) return "0";
  if (size >= 1e9) return fmt::format("{:.4g}G", value / 1e9);
  if (size >= 1e6) return fmt::format("{:.4g}M", value / 1e6);
  if (size >= 1e4) return fmt::format("{:.4g}k", value / 1e3);
  if (size < 1e-3) return fmt::format("{:.2g}", value);
  return fmt::format("{:.4g}", value);
}

Points finite(const Points& points) {
  Points kept;
  for (const auto& point : points) {
    if (std::isfinite(point.first) && std::isfinite(point.second)) kept.push_back(point);
  }
  return kept;
}

struct Extent {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void take(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

}  // namespace

Points thinned(const Points& points, std::size_t limit) {
  if (points.size() <= limit || limit == 0) return points;
  Points thin;
  for (std::size_t i = 0; i < limit; ++i) {
    const std::size_t begin = i * points.size() / limit, end = (i + 1) * points.size() / limit;
    double x = 0, y = 0;
    for (std::size_t j = begin; j < end; ++j) {
      x += points[j].first;
      y += points[j].second;
    }
    const auto count = static_cast<double>(end - begin);
    thin.emplace_back(x / count, y / count);
  }
  return thin;
}

Points smoothed(const Points& points, double window) {
  const double keep = 1.0 - 1.0 / std::max(1.0, window);
  double mean = 0, weight = 0;
  Points smooth;
  for (const auto& [x, y] : points) {
    mean = keep * mean + (1 - keep) * y;
    weight = keep * weight + (1 - keep);
    smooth.emplace_back(x, mean / weight);
  }
  return smooth;
}

std::vector<double> axis_ticks(double low, double high, int about) {
  const double raw = (high - low) / std::max(1, about);
  if (!(raw > 0) || !std::isfinite(raw)) return {low};
  const double step = round_step(raw);
  std::vector<double> ticks;
  for (double k = std::ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; ++k) ticks.push_back(k * step);
  return ticks;
}

std::string render_chart(const Chart& chart) {
  Extent xs, ys;
  std::vector<Points> lines;
  for (const Series& series : chart.series) {
    lines.push_back(finite(series.points));
    for (const auto& [x, y] : lines.back()) {
      xs.take(x);
      ys.take(y);
    }
  }
  const double width = chart.wide ? 1290 : 640, height = chart.wide ? 330 : 260;
  std::string html = fmt::format(
      "<figure{}><figcaption>{}{}</figcaption>", chart.wide ? " class=\"wide\"" : "", escape_markup(chart.title),
      chart.unit.empty() ? "" : fmt::format(" <small>{}</small>", escape_markup(chart.unit)));
  if (xs.low > xs.high) return html + "<p class=\"empty\">no values</p></figure>";

  if (chart.from_zero) ys.take(0);
  const double spread = ys.high > ys.low ? ys.high - ys.low : std::max(1e-12, std::abs(ys.high) * 0.1);
  const double y_low = chart.from_zero && ys.low >= 0 ? 0 : ys.low - 0.06 * spread;
  const double y_high = ys.high + 0.06 * spread;
  const double x_low = xs.low, x_high = xs.high > xs.low ? xs.high : xs.low + 1;
  const auto px = [&](double x) { return kLeft + (x - x_low) / (x_high - x_low) * (width - kLeft - kRight); };
  const auto py = [&](double y) {
    return height - kBottom - (y - y_low) / (y_high - y_low) * (height - kTop - kBottom);
  };

  nlohmann::json data = {{"x", {x_low, x_high}}, {"y", {y_low, y_high}}, {"series", nlohmann::json::array()}};
  std::string body;
  const auto y_ticks = axis_ticks(y_low, y_high, 5);
  const double y_step = y_ticks.size() > 1 ? y_ticks[1] - y_ticks[0] : 0;
  for (const double tick : y_ticks) {
    body += fmt::format(
        "<line class=\"grid\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>"
        "<text class=\"tick\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>",
        kLeft, width - kRight, py(tick), py(tick), kLeft - 7, py(tick) + 4, label_text(tick, y_step));
  }
  const auto x_ticks = axis_ticks(x_low, x_high, 8);
  for (const double tick : x_ticks) {
    if (tick != std::floor(tick)) continue;  // steps are whole numbers
    body += fmt::format("<text class=\"tick\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>", px(tick),
                        height - kBottom + 17, label_text(tick, 1));
  }
  body += fmt::format("<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{1:.1f}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>", kLeft,
                      width - kRight, height - kBottom);

  const auto drawn = std::count_if(chart.series.begin(), chart.series.end(), [](const Series& s) { return !s.faint; });
  std::string legend;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const Series& series = chart.series[i];
    const Points& points = lines[i];
    if (points.empty()) continue;
    std::string path;
    for (const auto& [x, y] : points) path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px(x), py(y));
    body +=
        fmt::format("<path d=\"{}\" stroke=\"{}\" class=\"{}\"/>", path, series.color, series.faint ? "faint" : "line");
    if (series.markers || points.size() == 1) {
      for (const auto& [x, y] : points) {
        body += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.2\" fill=\"{}\"/>", px(x), py(y), series.color);
      }
    }
    if (series.faint) continue;
    if (drawn > 1) {
      legend += fmt::format("<span><i style=\"background:{}\"></i>{}</span>", series.color, escape_markup(series.name));
    }
    nlohmann::json values = nlohmann::json::array();
    for (const auto& [x, y] : points) values.push_back({x, std::stod(fmt::format("{:.6g}", y))});
    data["series"].push_back({{"name", series.name}, {"color", series.color}, {"points", std::move(values)}});
  }
  data["frame"] = {kLeft, width - kRight, kTop, height - kBottom};
  if (!legend.empty()) html += fmt::format("<div class=\"legend\">{}</div>", legend);
  return html +
         fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\" data-chart=\"{}\">{}</svg></figure>",
                     width, height, escape_markup(chart.title), escape_markup(data.dump()), body);
}

}  // namespace phalanx::train
