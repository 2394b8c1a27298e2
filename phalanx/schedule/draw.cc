#include "phalanx/schedule/draw.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/base/svg.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/schedule_text.h"

namespace phalanx::schedule {
namespace {

// Sizes in pixels.
constexpr double kMargin = 24, kHead = 62, kLabels = 64, kNotes = 176, kRow = 34, kRowGap = 8, kAxis = 34, kLegend = 40;
constexpr double kNarrowestPlot = 900, kWidestPlot = 6000, kNarrowestBox = 17, kCharacter = 7.6;

struct Ink {
  ActionKind kind;
  std::string_view meaning;
  std::array<int, 3> colour;  // distinguishable for every kind of colour vision, and in grey
  bool dark_text;
};

constexpr std::array<Ink, 4> kInks = {{
    {ActionKind::forward, "F  forward", {59, 111, 182}, false},
    {ActionKind::backward, "B  backward", {214, 110, 46}, false},
    {ActionKind::backward_input, "I  backward, input half", {238, 180, 55}, true},
    {ActionKind::backward_weight, "W  backward, weight half", {46, 139, 104}, false},
}};

const Ink& ink_of(ActionKind kind) {
  return *std::find_if(kInks.begin(), kInks.end(), [&](const Ink& ink) { return ink.kind == kind; });
}

// The colour mixed with the share `light` of white.
std::string colour_text(const Ink& ink, double light) {
  std::string text = "#";
  for (const int part : ink.colour) {
    fmt::format_to(std::back_inserter(text), "{:02x}", static_cast<int>(std::lround(part + (255 - part) * light)));
  }
  return text;
}

struct Frame {
  std::string name = {};  // of the picture, among others
  std::string unit = {};  // of the times
  double longest = 0.0;   // the time that the width represents; at least the makespan
};

class Picture {
 public:
  Picture(const Schedule& schedule, const Simulation& simulation, Frame frame = {})
      : schedule_(schedule), simulation_(simulation), frame_(std::move(frame)) {
    double narrowest = std::numeric_limits<double>::infinity();
    std::size_t longest_text = 1, longest_number = 1;
    each_pass([&](std::size_t, const Action& part, const Span& span, int, int) {
      narrowest = std::min(narrowest, span.end - span.start);
      kinds_.insert(part.kind);
      longest_text = std::max(longest_text, to_text(part).size());
      longest_number = std::max(longest_number, std::to_string(part.micro_batch).size());
    });
    const double time = std::max({simulation.makespan, frame_.longest, 1e-300});
    plot_ = std::isinf(narrowest) ? kNarrowestPlot
                                  : std::clamp(kNarrowestBox * time / narrowest, kNarrowestPlot, kWidestPlot);
    scale_ = plot_ / time;
    // One form of label for the whole picture: the longest form that fits into the narrowest box.
    const double characters = std::isinf(narrowest) ? 0 : (narrowest * scale_ - 3) / kCharacter;
    const bool loops = schedule.stages() > schedule.ranks();
    if (loops && characters >= static_cast<double>(longest_text))
      label_ = Label::whole;
    else if (characters >= static_cast<double>(longest_number + 1))
      label_ = Label::kind;
    else if (characters >= 0.9 * static_cast<double>(longest_number))
      label_ = Label::number;
    height_ = kHead + static_cast<double>(schedule.ranks()) * (kRow + kRowGap) + kAxis + kLegend + kMargin / 2;
    width_ = kMargin + kLabels + plot_ + kNotes;
  }

  double width() const { return width_; }
  double height() const { return height_; }
  double plot() const { return plot_; }
  /// For several pictures to one scale.
  void widen_to(double plot) {
    width_ += plot - plot_;
    scale_ *= plot / plot_;
    plot_ = plot;
  }

  std::string title() const {
    return fmt::format("{}{}: {:.1f} % bubble", schedule_.name, frame_.name.empty() ? "" : ", " + frame_.name,
                       100 * simulation_.bubble);
  }

  std::string draw() {
    head();
    rows();
    axis();
    legend();
    return std::move(svg_);
  }

 private:
  enum class Label { none, number, kind, whole };

  template <typename... Values>
  void add(fmt::format_string<Values...> format, Values&&... values) {
    fmt::format_to(std::back_inserter(svg_), format, std::forward<Values>(values)...);
  }

  // Without backward passes no activations are saved.
  bool goes_back() const { return kinds_ != std::set{ActionKind::forward}; }
  std::string in_unit() const { return frame_.unit.empty() ? "" : " " + frame_.unit; }
  double x(double time) const { return kMargin + kLabels + time * scale_; }
  static double y(std::size_t rank) { return kHead + static_cast<double>(rank) * (kRow + kRowGap); }

  // Calls visit(rank, pass, span, its number among the parts, how many parts) for passes that take time. Others, such
  // as backward passes where there are none, cannot be seen.
  template <typename Visit>
  void each_pass(const Visit& visit) const {
    for (std::size_t rank = 0; rank < schedule_.actions.size(); ++rank) {
      for (std::size_t i = 0; i < schedule_.actions[rank].size(); ++i) {
        const Action& action = schedule_.actions[rank][i];
        const bool overlap = action.kind == ActionKind::overlap;
        if (!overlap && !is_pass(action.kind)) continue;
        if (!(simulation_.spans[rank][i].end > simulation_.spans[rank][i].start)) continue;
        int number = 0;
        for_each_sub_action(action, [&](const Action& part) {
          visit(rank, part, simulation_.spans[rank][i], number++,
                overlap ? static_cast<int>(action.sub_actions.size()) : 1);
        });
      }
    }
  }

  void head() {
    const int stages = schedule_.stages(), ranks = schedule_.ranks();
    const std::string each = stages == ranks ? "" : fmt::format(" with {} stages", stages / ranks);
    add("<text x=\"{:.0f}\" y=\"30\" font-size=\"19\" font-weight=\"bold\" fill=\"#1b1f24\">{}</text>\n", kMargin,
        escape_markup(title()));
    add("<text x=\"{:.0f}\" y=\"50\" fill=\"#57606a\">{} ranks{}, {} micro-batches, makespan {:.6g}{}</text>\n",
        kMargin, ranks, each, schedule_.micro_batches, simulation_.makespan, in_unit());
    add("<text x=\"{:.1f}\" y=\"50\" fill=\"#57606a\">waits</text>\n", x(0) + plot_ + 14);
    if (goes_back()) add("<text x=\"{:.1f}\" y=\"50\" fill=\"#57606a\">live at most</text>\n", x(0) + plot_ + 84);
  }

  void rows() {
    for (std::size_t rank = 0; rank < schedule_.actions.size(); ++rank) {
      const double middle = y(rank) + kRow / 2 + 4.5;
      add("<text x=\"{:.0f}\" y=\"{:.1f}\" fill=\"#1b1f24\">Rank {}</text>\n", kMargin, middle, rank);
      add("<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.0f}\" fill=\"#eceff2\"/>\n", x(0), y(rank),
          plot_, kRow);
      add("<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"#1b1f24\">{:.1f} %</text>\n", x(0) + plot_ + 14, middle,
          100 * simulation_.bubble_of_rank[rank]);
      if (!goes_back()) continue;
      add("<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"#1b1f24\">{}</text>\n", x(0) + plot_ + 84, middle,
          simulation_.peak_live_activations[rank]);
    }
    each_pass([&](std::size_t rank, const Action& pass, const Span& span, int number, int sub_actions) {
      const Ink& ink = ink_of(pass.kind);
      const double light = lightness(pass.stage), height = kRow / sub_actions;
      const double left = x(span.start), width = (span.end - span.start) * scale_, top = y(rank) + number * height;
      add("<g><title>{}: {:.6g} to {:.6g}</title>"
          "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"{}\" stroke=\"#ffffff\" "
          "stroke-width=\"1\"/>",
          to_text(pass), span.start, span.end, left, top, width, height, colour_text(ink, light));
      if (const std::string text = label(pass); !text.empty()) {
        add("<text x=\"{:.2f}\" y=\"{:.1f}\" font-size=\"{}\" text-anchor=\"middle\" fill=\"{}\">{}</text>",
            left + width / 2, top + height / 2 + 4, sub_actions > 1 || label_ == Label::number ? 11 : 12,
            ink.dark_text || light > 0.3 ? "#1b1f24" : "#ffffff", text);
      }
      add("</g>\n");
    });
  }

  // The first stage of a rank has the full colour.
  double lightness(int stage) const {
    const std::vector<int> local = schedule_.stages_of(rank_of(schedule_, stage));
    if (local.size() < 2) return 0.0;
    const auto place = std::find(local.begin(), local.end(), stage) - local.begin();
    return 0.55 * static_cast<double>(place) / static_cast<double>(local.size() - 1);
  }

  std::string label(const Action& pass) const {
    switch (label_) {
      case Label::whole:
        return to_text(pass);
      case Label::kind:
        return fmt::format("{}{}", to_text(pass.kind), pass.micro_batch);
      case Label::number:
        return std::to_string(pass.micro_batch);
      default:
        return {};
    }
  }

  void axis() {
    const double top = y(schedule_.actions.size()) - kRowGap / 2;
    add("<g stroke=\"#8c959f\" fill=\"#57606a\" font-size=\"11\">\n<path d=\"M{:.2f} {:.1f}h{:.2f}\"/>\n", x(0), top,
        plot_);
    const double step = round_step(60 / scale_);
    for (int tick = 0; tick * step <= std::max(simulation_.makespan, frame_.longest) * (1 + 1e-9); ++tick) {
      const double at = x(tick * step);
      add("<path d=\"M{:.2f} {:.1f}v5\"/><text x=\"{:.2f}\" y=\"{:.1f}\" text-anchor=\"middle\" "
          "stroke=\"none\">{:.6g}</text>\n",
          at, top, at, top + 18, tick * step);
    }
    add("<text x=\"{:.2f}\" y=\"{:.1f}\" stroke=\"none\">time{}</text>\n</g>\n", x(0) + plot_ + 14, top + 18,
        frame_.unit.empty() ? "" : ", " + frame_.unit);
  }

  void legend() {
    const double top = y(schedule_.actions.size()) + kAxis;
    double left = x(0);
    const auto entry = [&](const std::string& colour, std::string_view text) {
      add("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"15\" height=\"15\" fill=\"{}\"/>"
          "<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"#1b1f24\" xml:space=\"preserve\">{}</text>\n",
          left, top, colour, left + 21, top + 12, text);
      left += 21 + 7.2 * static_cast<double>(text.size()) + 24;
    };
    for (const Ink& ink : kInks) {
      if (kinds_.contains(ink.kind)) entry(colour_text(ink, 0.0), ink.meaning);
    }
    if (schedule_.stages() > schedule_.ranks()) entry(colour_text(kInks[0], 0.55), "lighter: the rank's last stage");
    entry("#eceff2", "waits");
  }

  const Schedule& schedule_;
  const Simulation& simulation_;
  const Frame frame_;
  double plot_ = 0, scale_ = 0, width_ = 0, height_ = 0;
  Label label_ = Label::none;
  std::set<ActionKind> kinds_;  // of the passes that are drawn
  std::string svg_;
};

}  // namespace

std::string to_svg(const Schedule& schedule, const Simulation& simulation) {
  Picture picture(schedule, simulation);
  const std::string title = picture.title();
  return svg_sheet({.width = picture.width(), .height = picture.height(), .title = title}, picture.draw());
}

std::string to_svg(const Schedule& schedule, const std::vector<NamedSimulation>& simulations, const std::string& unit) {
  double longest = 0.0, plot = 0.0, width = 0.0, height = 0.0;
  for (const auto& one : simulations) longest = std::max(longest, one.simulation.makespan);
  std::vector<Picture> pictures;
  for (const auto& one : simulations) {
    pictures.emplace_back(schedule, one.simulation, Frame{.name = one.name, .unit = unit, .longest = longest});
    plot = std::max(plot, pictures.back().plot());
  }
  std::string content;
  for (Picture& picture : pictures) {
    picture.widen_to(plot);
    content += fmt::format("<g transform=\"translate(0 {:.0f})\">\n{}</g>\n", height, picture.draw());
    width = std::max(width, picture.width());
    height += picture.height();
  }
  return svg_sheet({.width = width, .height = height, .title = schedule.name}, content);
}

}  // namespace phalanx::schedule
