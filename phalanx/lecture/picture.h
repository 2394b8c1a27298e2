// Picture: boxes, arrows and words of a lecture's picture, as an SVG element.
//
// Colours are classes of the page's style sheet (html_page.cc), so a picture is light or dark with its page:
// "t0" to "t3" (a rank's own), "sum" (complete), "plain", "wait".
//
//   Picture picture(120, 40, "one rank");
//   picture.text(0, 20, "rank 0");
//   picture.box({.x = 60, .y = 4, .width = 50, .height = 24}, "A", "t0");
#pragma once

#include <string>
#include <vector>

namespace phalanx::lecture {

struct Area {
  double x = 0, y = 0, width = 0, height = 0;  // in pixels
};

class Picture {
 public:
  /// The title is shown above the drawing, which begins at y = 0.
  Picture(double width, double height, std::string title);

  /// The text stands in the middle of the box.
  void box(const Area& area, const std::string& text, const std::string& style);
  /// `anchor`: start, middle or end. y is the text's base line.
  void text(double x, double y, const std::string& text, const std::string& anchor = "start");
  void arrow(double x1, double y1, double x2, double y2);
  /// Leaves and enters on the right, `reach` pixels away.
  void arrow_around(double x1, double y1, double x2, double y2, double reach);

  /// One <svg>, which loads nothing.
  std::string svg() const;

 private:
  double width_, height_;
  std::string title_, content_;
};

/// A part of memory, by rank: cells[rank][column], and what moved to give it.
struct Transfer {
  int from = 0, to = 0, column = 0;
};
/// Ranks below each other, a cell for each column, arrows from rank to rank. A cell without a 0 is complete.
Picture picture_of_state(const std::string& title, const std::vector<std::vector<std::string>>& cells,
                         const std::vector<Transfer>& transfers);

struct GridRow {
  std::string label;
  /// One alone is as wide as all columns. One of #, o and . is drawn as parts: coloured, plain and dashed; | stands
  /// between groups of them.
  std::vector<std::string> cells;
  std::string remark = {};
  bool is_equal = false;  // the cells hold the same
};
/// A table of boxes under its heads: one colour a column.
Picture picture_of_grid(const std::string& title, const std::vector<std::string>& heads,
                        const std::vector<GridRow>& rows);

/// What happens on a line, from one time to another.
struct Span {
  double begin = 0, end = 0;
  std::string text;
  std::string style = "t0";
};
struct Lane {
  std::string label;
  std::vector<Span> spans;
  std::string remark = {};
};
/// Lanes below each other, `scale` pixels a unit of time. Where nothing happens it is dashed.
Picture picture_of_spans(const std::string& title, const std::vector<Lane>& lanes, double scale);

struct Bar {
  std::string label;
  double length = 0;  // between 0 and 1
  std::string remark;
  std::string style = "t0";
};
Picture picture_of_bars(const std::string& title, const std::vector<Bar>& bars);

}  // namespace phalanx::lecture
