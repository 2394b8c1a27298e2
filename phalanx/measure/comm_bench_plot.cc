#include "phalanx/measure/comm_bench_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "phalanx/base/svg.h"

namespace phalanx::measure {
namespace {

constexpr double kChartWidth = 500, kChartHeight = 270, kGap = 40, kLeft = 70, kPlotTop = 34, kPlotBottom = 46;
constexpr std::array kColors{"#2563eb", "#dc2626", "#16a34a", "#9333ea", "#d97706", "#0891b2", "#db2777", "#4b5563"};
constexpr const char* kRoofColor = "#6b7280";

using Points = std::vector<std::pair<double, double>>;  // (bytes, value)

constexpr std::size_t kRoof = ~std::size_t{0};  // the pen of the copy roofline

struct Line {
  std::size_t pen = 0;  // its index among the names
  Points points;
};

std::string color_of(std::size_t pen) { return pen == kRoof ? kRoofColor : kColors[pen % kColors.size()]; }
const char* dash_of(std::size_t pen) { return pen == kRoof ? " stroke-dasharray=\"6 4\"" : ""; }

/// The marker that distinguishes a line without colours: a circle, square, triangle or diamond, filled or hollow.
std::string marker(std::size_t pen, double x, double y) {
  constexpr std::array kShapes{"M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z", "M-3-3h6v6h-6z", "M0-4L4 3H-4z",
                               "M0-4.5L4.5 0L0 4.5L-4.5 0z"};
  if (pen == kRoof) return {};
  const bool is_full = pen / kShapes.size() % 2 == 0;
  return fmt::format("<path transform=\"translate({:.1f} {:.1f})\" d=\"{}\" fill=\"{}\" stroke=\"{}\"/>", x, y,
                     kShapes[pen % kShapes.size()], is_full ? color_of(pen) : "#ffffff", color_of(pen));
}

/// A value axis: positions in [0, 1] and the positions of its labels.
struct Axis {
  bool logarithmic = true;
  double low = 1, high = 10;
  double at(double value) const {
    return logarithmic ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
  }
};

Axis axis_of(const std::vector<Line>& lines, bool logarithmic) {
  Axis axis{logarithmic, 1e300, 0};
  for (const Line& line : lines) {
    for (const auto& [bytes, value] : line.points) {
      axis.low = std::min(axis.low, value);
      axis.high = std::max(axis.high, value);
    }
  }
  if (logarithmic) {
    axis.low = std::pow(10, std::floor(std::log10(axis.low)));
    axis.high = std::max(axis.low * 10, std::pow(10, std::ceil(std::log10(axis.high))));
  } else {
    axis.low = 0;
    axis.high = axis.high > 0 ? axis.high * 1.06 : 1;  // one rank moves no data over a bus; its zeros have no logarithm
  }
  return axis;
}

/// Decades, or multiples of 1, 2 or 5 times a power of ten.
std::vector<double> labels_of(const Axis& axis) {
  std::vector<double> labels;
  if (axis.logarithmic) {
    for (double value = axis.low; value <= axis.high * 1.001; value *= 10) labels.push_back(value);
    return labels;
  }
  const double step = round_step(axis.high / 5);
  for (double value = 0; value <= axis.high; value += step) labels.push_back(value);
  return labels;
}

std::string short_number(double value) {
  if (value >= 1e6) return fmt::format("{:g}M", value / 1e6);
  if (value >= 1e3) return fmt::format("{:g}k", value / 1e3);
  return fmt::format("{:.3g}", value);
}

std::string chart(double left, double top, const std::string& title, const std::vector<Line>& lines, bool logarithmic) {
  const double x0 = left + kLeft, x1 = left + kChartWidth - 10;
  const double y0 = top + kChartHeight - kPlotBottom, y1 = top + kPlotTop;
  const Axis values = axis_of(lines, logarithmic);
  std::set<double> sizes;
  for (const Line& line : lines) {
    for (const auto& point : line.points) sizes.insert(point.first);
  }
  const Axis bytes{true, *sizes.begin(), std::max(*sizes.rbegin(), *sizes.begin() * 2)};
  const auto px = [&](double value) { return x0 + bytes.at(value) * (x1 - x0); };
  const auto py = [&](double value) { return y0 - values.at(value) * (y0 - y1); };

  std::string svg = fmt::format("<text x=\"{:.0f}\" y=\"{:.0f}\" class=\"title\">{}</text>\n", x0, top + 20, title);
  for (const double label : labels_of(values)) {
    svg += fmt::format(
        "<line x1=\"{0:.1f}\" x2=\"{1:.1f}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" class=\"grid\"/>"
        "<text x=\"{3:.1f}\" y=\"{4:.1f}\" text-anchor=\"end\">{5}</text>\n",
        x0, x1, py(label), x0 - 8, py(label) + 4, short_number(label));
  }
  // As many size labels as there is space for.
  double last = -1e9;
  for (const double size : sizes) {
    if (px(size) - last < 44) continue;
    last = px(size);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n", last, y0 + 18,
                       size_text(static_cast<std::int64_t>(size)));
  }
  svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">bytes</text>\n", (x0 + x1) / 2, y0 + 36);
  svg +=
      fmt::format("<line x1=\"{0:.1f}\" x2=\"{1:.1f}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" class=\"axis\"/>\n", x0, x1, y0);
  for (const Line& line : lines) {
    std::string path, markers;
    for (const auto& [size, value] : line.points) {
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : " L", px(size), py(value));
      markers += marker(line.pen, px(size), py(value));
    }
    svg += fmt::format("<path d=\"{}\" stroke=\"{}\" fill=\"none\" stroke-width=\"2\"{}/>{}\n", path,
                       color_of(line.pen), dash_of(line.pen), markers);
  }
  return svg;
}

/// The name of a row's line: the properties that differ between rows.
class Naming {
 public:
  explicit Naming(const CommBenchResult& result) {
    for (const CommBenchRow& row : result.rows) {
      types_.insert(row.what.type);
      if (reduces(row.what.verb)) ops_.insert(row.what.op);
      places_.insert({row.what.verb, row.what.place});
    }
    std::map<BenchVerb, int> count;
    for (const auto& [verb, place] : places_) both_places_ = both_places_ || ++count[verb] > 1;
  }
  std::string operator()(const CommBenchRow& row) const {
    std::string name = row.backend;
    if (types_.size() > 1) name += fmt::format(" {}", text_of(row.what.type));
    if (ops_.size() > 1 && reduces(row.what.verb)) name += fmt::format(" {}", text_of(row.what.op));
    if (both_places_ && row.what.place == Place::in && places_.contains({row.what.verb, Place::out}))
      name += " in place";
    return name;
  }

 private:
  std::set<DataType> types_;
  std::set<ReduceOp> ops_;
  std::set<std::pair<BenchVerb, Place>> places_;
  bool both_places_ = false;
};

struct Legend {
  std::string svg;
  double height = 0;
};

/// The legend of the lines, in as many rows as needed.
Legend legend(const std::vector<std::string>& names, bool has_roof, double width) {
  Legend result;
  double x = 24, y = 60;
  const auto add = [&](std::size_t pen, const std::string& name) {
    const double entry = 52 + 7.2 * static_cast<double>(name.size());
    if (x > 24 && x + entry > width) {
      x = 24;
      y += 20;
    }
    result.svg += fmt::format(
        "<line x1=\"{0:.0f}\" x2=\"{1:.0f}\" y1=\"{2:.0f}\" y2=\"{2:.0f}\" stroke=\"{3}\" stroke-width=\"2\"{4}/>"
        "{5}<text x=\"{6:.0f}\" y=\"{7:.0f}\">{8}</text>\n",
        x, x + 24, y, color_of(pen), dash_of(pen), marker(pen, x + 12, y), x + 30, y + 4, escape_markup(name));
    x += entry;
  };
  for (std::size_t pen = 0; pen < names.size(); ++pen) add(pen, names[pen]);
  if (has_roof) add(kRoof, "copy roofline (memcpy by all ranks at once)");
  result.height = y + 12;
  return result;
}

}  // namespace

std::string comm_bench_plot(const CommBenchResult& result) {
  const Naming naming(result);
  std::vector<BenchVerb> verbs;
  std::vector<std::string> names;  // of the lines, in the order of first appearance
  std::map<BenchVerb, std::vector<std::pair<std::string, std::vector<const CommBenchRow*>>>> series;
  for (const CommBenchRow& row : result.rows) {
    if (row.what.bytes() == 0 || row.p50 <= 0) continue;
    const std::string name = naming(row);
    if (std::ranges::find(verbs, row.what.verb) == verbs.end()) verbs.push_back(row.what.verb);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    auto& of_verb = series[row.what.verb];
    auto found = std::ranges::find(of_verb, name, &std::pair<std::string, std::vector<const CommBenchRow*>>::first);
    if (found == of_verb.end()) found = of_verb.insert(of_verb.end(), {name, {}});
    found->second.push_back(&row);
  }

  std::string body;
  bool has_roof = false;
  double top = 0;  // below the legend
  for (const BenchVerb verb : verbs) {
    std::vector<Line> times, speeds;
    std::map<double, std::pair<double, double>> roof;  // by size: seconds, and GB/s on the scale of the bus
    for (const auto& [name, rows] : series[verb]) {
      const auto pen = static_cast<std::size_t>(std::ranges::find(names, name) - names.begin());
      Line time{.pen = pen, .points = {}}, speed{.pen = pen, .points = {}};
      for (const CommBenchRow* row : rows) {
        const auto bytes = static_cast<double>(row->what.bytes());
        time.points.emplace_back(bytes, row->p50 * 1e6);
        speed.points.emplace_back(bytes, row->busbw());
        if (row->copy_seconds) {
          roof[bytes] = {*row->copy_seconds * 1e6, bytes / *row->copy_seconds / 1e9 * bus_factor(verb, result.ranks)};
        }
      }
      times.push_back(std::move(time));
      speeds.push_back(std::move(speed));
    }
    if (!roof.empty()) {
      has_roof = true;
      Line time{.pen = kRoof, .points = {}}, speed{.pen = kRoof, .points = {}};
      for (const auto& [bytes, both] : roof) {
        time.points.emplace_back(bytes, both.first);
        speed.points.emplace_back(bytes, both.second);
      }
      times.push_back(std::move(time));
      speeds.push_back(std::move(speed));
    }
    const std::string name(name_of(verb));
    body += chart(0, top, name + ": time of a call, us (p50)", times, true);
    const bool moves = result.ranks > 1;  // one rank moves no data over a bus; its zeros have no logarithm
    body += chart(kChartWidth + kGap, top, name + ": bus bandwidth, GB/s", speeds, moves);
    top += kChartHeight + 16;
  }
  if (verbs.empty()) {
    body = "<text x=\"24\" y=\"24\">no rows with bytes were measured</text>\n";
    top += 60;
  }
  const double width = 2 * kChartWidth + kGap + 16;
  const Legend lines_text = legend(names, has_roof, width);
  const std::string title =
      fmt::format("Collectives over {} ranks on {}: {}, {} cores", result.ranks, result.host, result.cpu, result.cores);
  return svg_sheet(
      {.width = width, .height = lines_text.height + top + 8, .title = title},
      fmt::format("<style>text{{font-size:12px;fill:#374151}}.title{{font-weight:600;fill:#111827;font-size:13px}}"
                  ".head{{font-size:17px;font-weight:600;fill:#111827}}.grid{{stroke:#e5e7eb}}.axis{{stroke:#374151}}"
                  "</style>\n<text x=\"24\" y=\"32\" class=\"head\">{}</text>\n{}"
                  "<g transform=\"translate(0 {:.0f})\">\n{}</g>\n",
                  escape_markup(title), lines_text.svg, lines_text.height, body));
}

}  // namespace phalanx::measure
