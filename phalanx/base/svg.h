// What the pictures of the program have in common: each is one SVG file that is complete in itself (no scripts, fonts
// or links), on white ground.
//
//   write_file("bars.svg", svg_sheet({.width = 900, .height = 300, .title = "Memory"}, rectangles_and_texts));
#pragma once

#include <string>
#include <string_view>

namespace phalanx {

/// Text as it may stand in XML and HTML, between tags and in quotes. What these cannot hold, bytes that are no UTF-8
/// and control characters, becomes the replacement character, U+FFFD.
std::string escape_markup(std::string_view text);

struct SvgSheet {
  double width = 0, height = 0;  // in pixels
  std::string title;             // plain text; shown when pointed at, and read to those who do not see
};
std::string svg_sheet(const SvgSheet& sheet, std::string_view content);

/// The distance between the labels of an axis: 1, 2 or 5 times a power of ten, at least `least` (above 0).
double round_step(double least);

}  // namespace phalanx
