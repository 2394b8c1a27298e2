#include "phalanx/lecture/picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "phalanx/base/svg.h"

namespace phalanx::lecture {
namespace {

constexpr double kTitleHeight = 22, kRowHeight = 28, kBoxHeight = 22, kLetter = 7.3;

double width_of(const std::string& text) { return kLetter * static_cast<double>(text.size()); }

double widest(const std::vector<std::string>& texts) {
  double width = 0;
  for (const std::string& text : texts) width = std::max(width, width_of(text));
  return width;
}

std::string tone(std::size_t number) { return fmt::format("t{}", number % 4); }

}  // namespace

Picture::Picture(double width, double height, std::string title)
    : width_(std::max(width, width_of(title))), height_(height), title_(std::move(title)) {}

void Picture::box(const Area& area, const std::string& text, const std::string& style) {
  content_ += fmt::format(R"svg(<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="3"/>)svg",
                          style, area.x, area.y, area.width, area.height);
  if (!text.empty()) this->text(area.x + area.width / 2, area.y + area.height / 2 + 4, text, "middle");
}

void Picture::text(double x, double y, const std::string& text, const std::string& anchor) {
  content_ += fmt::format(R"svg(<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>)svg", x, y, anchor,
                          escape_markup(text)) +
              "\n";
}

void Picture::arrow(double x1, double y1, double x2, double y2) {
  content_ += fmt::format(R"svg(<path class="arrow" d="M{:.1f} {:.1f}L{:.1f} {:.1f}" marker-end="url(#head)"/>)svg", x1,
                          y1, x2, y2) +
              "\n";
}

void Picture::arrow_around(double x1, double y1, double x2, double y2, double reach) {
  content_ +=
      fmt::format(R"svg(<path class="arrow" d="M{0:.1f} {1:.1f}C{4:.1f} {1:.1f} {4:.1f} {3:.1f} {2:.1f} {3:.1f}" )svg"
                  R"svg(marker-end="url(#head)"/>)svg",
                  x1, y1, x2, y2, std::max(x1, x2) + reach) +
      "\n";
}

std::string Picture::svg() const {
  return fmt::format(
      R"svg(<svg xmlns="http://www.w3.org/2000/svg" style="--w:{0:.0f}px" )svg"
      R"svg(viewBox="0 {1:.0f} {0:.0f} {2:.0f}" role="img">)svg"
      "\n<title>{3}</title>\n{4}{5}</svg>\n",
      width_, -kTitleHeight, height_ + kTitleHeight, escape_markup(title_),
      title_.empty() ? "" : fmt::format("<text class=\"title\" x=\"0\" y=\"-8\">{}</text>\n", escape_markup(title_)),
      content_);
}

Picture picture_of_state(const std::string& title, const std::vector<std::vector<std::string>>& cells,
                         const std::vector<Transfer>& transfers) {
  constexpr double kLeft = 52, kGap = 22;
  const double cell_width = std::max(34.0, width_of(cells.front().front()) + 10);
  const auto x_of = [&](int column) { return kLeft + column * (cell_width + kGap); };
  const auto y_of = [&](int rank) { return rank * (kBoxHeight + kGap); };
  const auto ranks = static_cast<int>(cells.size()), columns = static_cast<int>(cells.front().size());
  Picture picture(x_of(columns), y_of(ranks) - kGap + 4, title);
  for (int rank = 0; rank < ranks; ++rank) {
    picture.text(0, y_of(rank) + 15, fmt::format("rank {}", rank));
    for (int column = 0; column < columns; ++column) {
      const std::string& cell = cells[static_cast<std::size_t>(rank)][static_cast<std::size_t>(column)];
      picture.box({x_of(column), y_of(rank), cell_width, kBoxHeight}, cell,
                  cell.find('0') == std::string::npos ? "sum" : "plain");
    }
  }
  for (const Transfer& transfer : transfers) {
    const double middle = x_of(transfer.column) + cell_width / 2, right = x_of(transfer.column) + cell_width;
    if (transfer.to == transfer.from + 1) {
      picture.arrow(middle, y_of(transfer.from) + kBoxHeight, middle, y_of(transfer.to) - 3);
    } else if (transfer.to + 1 == transfer.from) {
      picture.arrow(middle, y_of(transfer.from), middle, y_of(transfer.to) + kBoxHeight + 3);
    } else {
      picture.arrow_around(right, y_of(transfer.from) + kBoxHeight / 2, right + 3, y_of(transfer.to) + kBoxHeight / 2,
                           kGap - 4);
    }
  }
  return picture;
}

namespace {

bool is_parts(const std::string& cell) {
  return cell.find_first_not_of("#o.|") == std::string::npos && cell.find_first_of("#o.") != std::string::npos;
}

void draw_parts(Picture& picture, const Area& area, const std::string& parts) {
  const double width = area.width / static_cast<double>(parts.size());
  std::size_t place = 0;  // within its group
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == '|') {
      place = 0;
      continue;
    }
    picture.box({area.x + static_cast<double>(i) * width, area.y, width - 1, area.height}, "",
                parts[i] == '#'   ? tone(place)
                : parts[i] == 'o' ? "plain"
                                  : "wait");
    ++place;
  }
}

}  // namespace

Picture picture_of_grid(const std::string& title, const std::vector<std::string>& heads,
                        const std::vector<GridRow>& rows) {
  constexpr double kGap = 8, kHeadHeight = 22;
  std::vector<std::string> labels, remarks, texts = heads;
  for (const GridRow& row : rows) {
    labels.push_back(row.label), remarks.push_back(row.remark);
    if (row.cells.size() == heads.size()) texts.insert(texts.end(), row.cells.begin(), row.cells.end());
  }
  const double left = widest(labels) + 12, cell_width = std::max(36.0, widest(texts) + 10);
  const double all = static_cast<double>(heads.size()) * (cell_width + kGap);
  Picture picture(left + all + widest(remarks) + 4, kHeadHeight + static_cast<double>(rows.size()) * kRowHeight, title);
  for (std::size_t i = 0; i < heads.size(); ++i) {
    picture.text(left + static_cast<double>(i) * (cell_width + kGap) + cell_width / 2, 14, heads[i], "middle");
  }
  double y = kHeadHeight;
  for (const GridRow& row : rows) {
    picture.text(0, y + 15, row.label);
    const double width = row.cells.size() == 1 && heads.size() > 1 ? all - kGap : cell_width;
    for (std::size_t i = 0; i < row.cells.size(); ++i) {
      const Area area{left + static_cast<double>(i) * (cell_width + kGap), y, width, kBoxHeight};
      if (is_parts(row.cells[i])) {
        draw_parts(picture, area, row.cells[i]);
      } else if (!row.cells[i].empty()) {
        picture.box(area, row.cells[i], row.is_equal ? "sum" : tone(i));
      }
    }
    picture.text(left + all, y + 15, row.remark);
    y += kRowHeight;
  }
  return picture;
}

Picture picture_of_spans(const std::string& title, const std::vector<Lane>& lanes, double scale) {
  std::vector<std::string> labels, remarks;
  double end = 0;
  for (const Lane& lane : lanes) {
    labels.push_back(lane.label), remarks.push_back(lane.remark);
    for (const Span& span : lane.spans) end = std::max(end, span.end);
  }
  const double left = widest(labels) + 12, right = left + scale * end;
  Picture picture(right + widest(remarks) + 12, kRowHeight * static_cast<double>(lanes.size()), title);
  double y = 0;
  for (const Lane& lane : lanes) {
    picture.text(0, y + 15, lane.label);
    picture.box({left, y, scale * end, kBoxHeight}, "", "wait");
    for (const Span& span : lane.spans) {
      const double width = scale * (span.end - span.begin);
      picture.box({left + scale * span.begin, y, width, kBoxHeight}, width_of(span.text) > width ? "" : span.text,
                  span.style);
    }
    picture.text(right + 8, y + 15, lane.remark);
    y += kRowHeight;
  }
  return picture;
}

Picture picture_of_bars(const std::string& title, const std::vector<Bar>& bars) {
  constexpr double kLongest = 320;
  std::vector<std::string> labels, remarks;
  for (const Bar& bar : bars) labels.push_back(bar.label), remarks.push_back(bar.remark);
  const double left = widest(labels) + 12;
  Picture picture(left + kLongest + widest(remarks) + 12, kRowHeight * static_cast<double>(bars.size()), title);
  double y = 0;
  for (const Bar& bar : bars) {
    const double length = std::max(2.0, kLongest * std::min(bar.length, 1.0));
    picture.text(0, y + 15, bar.label);
    picture.box({left, y, length, kBoxHeight}, "", bar.style);
    picture.text(left + length + 6, y + 15, bar.remark);
    y += kRowHeight;
  }
  return picture;
}

}  // namespace phalanx::lecture
