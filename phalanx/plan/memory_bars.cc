#include "phalanx/plan/memory_bars.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <string_view>
#include <utility>

#include "phalanx/base/svg.h"
#include "phalanx/plan/bytes_text.h"

namespace phalanx::plan {
namespace {

// Sizes in pixels.
constexpr double kNarrowest = 920, kMargin = 24, kHead = 66, kBar = 26, kRow = 84, kAxis = 34, kLegendRow = 24;
constexpr double kNarrowestLetter = 13;
constexpr double kCharacter = 7.4, kBoldCharacter = 9.2, kTitleCharacter = 12;  // approximate, rather too wide
constexpr double kFarLine = 3;                                                  // times the longest bar

struct Part {
  char letter;
  std::string_view meaning;
  std::string_view colour;  // distinguishable from its neighbours for every kind of colour vision
  std::string_view hatch;   // lines in a square of 8, over the colour; none: plain
  bool dark_text;
};

// In the order of the bars: the categories of MemoryCounts, then memory outside of tensors.
constexpr std::array<Part, observe::kMemoryCategories + 1> kParts = {{
    {'P', "parameters", "#3b6fb6", "", false},
    {'G', "gradients", "#d66e2e", "M-1 9L9 -1M-1 1L1 -1M7 9L9 7", false},
    {'O', "optimizer", "#2e8b68", "M0 4H8", false},
    {'A', "activations", "#eeb437", "", true},
    {'B', "buffers", "#8e5aa8", "M-1 -1L9 9M-1 7L1 9M7 -1L9 1", false},
    {'R', "beside tensors", "#8c959f", "M4 0V8", false},
}};

std::int64_t bytes_of(const Candidate& layout, std::size_t part) {
  return part < observe::kMemoryCategories ? layout.memory.peak.bytes[part] : layout.memory.runtime;
}

std::string fill_of(const Part& part) {
  return part.hatch.empty() ? std::string(part.colour) : fmt::format("url(#{})", part.letter);
}

std::string note_of(const Candidate& layout) {
  const std::int64_t total = layout.memory.total();
  return fmt::format("{} of {}{}", bytes_text(total), bytes_text(layout.available),
                     layout.fits() ? ", fits" : fmt::format(", {} too much", bytes_text(total - layout.available)));
}

class MemoryPicture {
 public:
  MemoryPicture(const std::vector<Candidate>& layouts, const MemoryBarsOptions& options)
      : layouts_(layouts), options_(options) {
    std::int64_t longest = 1, furthest = 0;
    const auto widen = [&](double text) { width_ = std::max(width_, 2 * kMargin + text); };
    widen(kTitleCharacter * static_cast<double>(options.title.size()));
    for (const Candidate& layout : layouts) {
      longest = std::max(longest, layout.memory.total());
      furthest = std::max(furthest, layout.available);
      const std::size_t bold = kind_of(layout.layout.parallel).size() + note_of(layout).size();
      widen(kBoldCharacter * static_cast<double>(bold) +
            kCharacter * static_cast<double>(name_of(layout.layout).size()) + 30);
    }
    const double most = static_cast<double>(longest);
    line_is_there_ = static_cast<double>(furthest) <= kFarLine * most;
    most_ = line_is_there_ ? std::max(most, static_cast<double>(furthest)) : most;
    scale_ = (width_ - 2 * kMargin - 2) / most_;  // the line stays inside
  }

  std::string draw() {
    head();
    for (std::size_t row = 0; row < layouts_.size(); ++row) bar(row);
    axis();
    const double bottom = legend();
    return svg_sheet({.width = width_, .height = bottom, .title = options_.title}, svg_);
  }

 private:
  template <typename... Values>
  void add(fmt::format_string<Values...> format, Values&&... values) {
    fmt::format_to(std::back_inserter(svg_), format, std::forward<Values>(values)...);
  }

  static double top_of(std::size_t row) { return kHead + static_cast<double>(row) * kRow; }
  double x(std::int64_t bytes) const { return kMargin + static_cast<double>(bytes) * scale_; }

  void head() {
    add("<defs>\n");
    for (const Part& part : kParts) {
      if (part.hatch.empty()) continue;
      add("<pattern id=\"{}\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\">"
          "<path d=\"M0 0H8V8H0z\" fill=\"{}\"/><path d=\"{}\" stroke=\"#ffffff\" stroke-opacity=\"0.45\" "
          "stroke-width=\"1.5\"/></pattern>\n",
          part.letter, part.colour, part.hatch);
    }
    add("</defs>\n<text x=\"{:.0f}\" y=\"30\" font-size=\"17\" font-weight=\"bold\" fill=\"#1b1f24\">{}</text>\n",
        kMargin, escape_markup(options_.title));
    add("<text x=\"{:.0f}\" y=\"50\" fill=\"#57606a\">{}</text>\n", kMargin, escape_markup(options_.detail));
  }

  void bar(std::size_t row) {
    const Candidate& layout = layouts_[row];
    const double top = top_of(row), bar_top = top + 24;
    add("<g>\n<text x=\"{:.0f}\" y=\"{:.0f}\" fill=\"#1b1f24\"><tspan font-weight=\"bold\">{}</tspan>"
        "<tspan dx=\"10\" font-size=\"12\" fill=\"#57606a\">{}</tspan></text>\n",
        kMargin, top + 16, kind_of(layout.layout.parallel), escape_markup(name_of(layout.layout)));
    add("<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"end\" fill=\"#1b1f24\"{}>{}</text>\n", width_ - kMargin,
        top + 16, layout.fits() ? "" : " font-weight=\"bold\"", note_of(layout));
    add("<path d=\"M{:.0f} {:.0f}h{:.0f}v{:.0f}h-{:.0f}z\" fill=\"#eceff2\"/>\n", kMargin, bar_top,
        width_ - 2 * kMargin, kBar, width_ - 2 * kMargin);

    std::int64_t before = 0;
    std::string numbers;
    for (std::size_t i = 0; i < kParts.size(); ++i) {
      const Part& part = kParts[i];
      const std::int64_t bytes = bytes_of(layout, i);
      if (bytes <= 0) continue;
      const double width = static_cast<double>(bytes) * scale_;
      add("<g><title>{}: {} ({} bytes)</title><rect x=\"{:.3f}\" y=\"{:.0f}\" width=\"{:.3f}\" height=\"{:.0f}\" "
          "fill=\"{}\"/>",
          part.meaning, bytes_text(bytes), bytes, x(before), bar_top, width, kBar, fill_of(part));
      if (width >= kNarrowestLetter) letter(part, x(before) + width / 2, bar_top + kBar / 2);
      add("</g>\n");
      numbers += fmt::format("{}{} {}", numbers.empty() ? "" : " + ", part.letter, bytes_text(bytes));
      before += bytes;
    }
    if (line_is_there_) {
      add("<path d=\"M{:.2f} {:.0f}v{:.0f}\" stroke=\"#1b1f24\" stroke-width=\"2.5\"/>\n", x(layout.available),
          bar_top - 4, kBar + 8);
    }
    add("<text x=\"{:.0f}\" y=\"{:.0f}\" font-size=\"12\" fill=\"#57606a\">{}</text>\n", kMargin, bar_top + kBar + 16,
        numbers);
    add("<text x=\"{:.0f}\" y=\"{:.0f}\" font-size=\"12\" text-anchor=\"end\" fill=\"#57606a\">sends {} a step</text>\n"
        "</g>\n",
        width_ - kMargin, bar_top + kBar + 16, bytes_text(layout.comm_volume.total()));
  }

  /// With an outline in the part's colour, so that the hatching does not cross it.
  void letter(const Part& part, double middle, double height) {
    add("<text x=\"{:.2f}\" y=\"{:.1f}\" text-anchor=\"middle\" font-weight=\"bold\" fill=\"{}\" stroke=\"{}\" "
        "stroke-width=\"4\" paint-order=\"stroke\">{}</text>",
        middle, height + 4.5, part.dark_text ? "#1b1f24" : "#ffffff", part.colour, part.letter);
  }

  void axis() {
    const double top = top_of(layouts_.size());
    int power = 0;  // of 1024
    while (power < 5 && most_ >= 1.5 * std::pow(1024.0, power + 1)) ++power;
    const double unit = std::pow(1024.0, power);
    constexpr std::array<std::string_view, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    const double step = round_step(std::max(70 / scale_ / unit, power == 0 ? 1.0 : 0.0));
    add("<g stroke=\"#8c959f\" fill=\"#57606a\" font-size=\"11\">\n<path d=\"M{:.2f} {:.1f}h{:.2f}\"/>\n", kMargin, top,
        width_ - 2 * kMargin);
    for (int tick = 0; tick * step * unit <= most_ * (1 + 1e-9); ++tick) {
      const double at = kMargin + tick * step * unit * scale_;
      add("<path d=\"M{0:.2f} {1:.1f}v5\"/><text x=\"{0:.2f}\" y=\"{2:.1f}\" text-anchor=\"{3}\" "
          "stroke=\"none\">{4:.6g}{5}</text>\n",
          at, top, top + 18, tick == 0 ? "start" : "middle", tick * step,
          tick == 0 ? fmt::format(" {}", kUnits[static_cast<std::size_t>(power)]) : "");
    }
    add("</g>\n");
  }

  /// Returns the lower end of the picture.
  double legend() {
    double left = kMargin, top = top_of(layouts_.size()) + kAxis;
    const auto place = [&](std::size_t characters) {
      const double width = 24 + kCharacter * static_cast<double>(characters) + 20;
      if (left > kMargin && left + width > width_) {
        left = kMargin;
        top += kLegendRow;
      }
      return std::exchange(left, left + width);
    };
    for (std::size_t i = 0; i < kParts.size(); ++i) {
      const Part& part = kParts[i];
      if (std::ranges::none_of(layouts_, [&](const Candidate& one) { return bytes_of(one, i) > 0; })) continue;
      const double at = place(part.meaning.size() + 2);
      add("<path d=\"M{:.1f} {:.1f}h16v16h-16z\" fill=\"{}\"/>"
          "<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"#1b1f24\"><tspan font-weight=\"bold\">{}</tspan> {}</text>\n",
          at, top, fill_of(part), at + 22, top + 13, part.letter, part.meaning);
    }
    std::string line = "what the device has";
    if (options_.headroom > 0) line += fmt::format(", less {:.3g} % that stay free", 100 * options_.headroom);
    if (!line_is_there_) line += "; it is further right than this picture goes";
    const double at = place(line.size());
    if (line_is_there_) {
      add("<path d=\"M{:.1f} {:.1f}v18\" stroke=\"#1b1f24\" stroke-width=\"2.5\"/>", at + 8, top - 1);
    }
    add("<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"#1b1f24\">{}</text>\n", at + (line_is_there_ ? 22 : 0), top + 13, line);
    return top + kLegendRow + kMargin / 2;
  }

  const std::vector<Candidate>& layouts_;
  const MemoryBarsOptions& options_;
  double width_ = kNarrowest;
  bool line_is_there_ = true;
  double most_ = 1;   // bytes that the width represents
  double scale_ = 1;  // pixels per byte
  std::string svg_;
};

}  // namespace

std::string memory_bars(const std::vector<Candidate>& layouts, const MemoryBarsOptions& options) {
  return MemoryPicture(layouts, options).draw();
}

}  // namespace phalanx::plan
