// Common parts of the program's pictures. Each is one self-contained SVG file (no scripts, fonts or links) on a white
// background.
//
//   write_file("bars.svg", svg_sheet({.width = 900, .height = 300, .title = "Memory"}, rectangles_and_texts));
#pragma once

#include <string>
#include <string_view>

namespace phalanx {

/// Escapes text for XML and HTML, between tags and in quotes. Invalid UTF-8 and control characters, which these formats
/// cannot hold, become the replacement character U+FFFD.
std::string escape_markup(std::string_view text);

struct SvgSheet {
  double width = 0, height = 0;  // in pixels
  std::string title;             // plain text; shown as a tooltip and read by screen readers
};
std::string svg_sheet(const SvgSheet& sheet, std::string_view content);

/// The distance between the labels of an axis: 1, 2 or 5 times a power of ten, at least `least`.
/// REQUIRES: least > 0.
double round_step(double least);

}  // namespace phalanx
