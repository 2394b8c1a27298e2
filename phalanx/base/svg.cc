#include "phalanx/base/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "phalanx/base/utf8.h"

namespace phalanx {

namespace {

/// The length in bytes of the first character of `text`; 0 if it is not valid UTF-8 or not allowed in XML.
std::size_t length_of_character(std::string_view text) {
  const Utf8Char c = first_char(text);
  const bool is_control = c.code_point < 0x20 && c.code_point != '\n' && c.code_point != '\t';
  const bool is_no_character = c.code_point == 0xFFFE || c.code_point == 0xFFFF;
  return is_control || is_no_character ? 0 : static_cast<std::size_t>(c.length);
}

}  // namespace

std::string escape_markup(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t length = length_of_character(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(length, 1));
    text.remove_prefix(character.size());
    if (length == 0) {
      out += "\xEF\xBF\xBD";  // U+FFFD, the replacement character
      continue;
    }
    switch (character[0]) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += character;
    }
  }
  return out;
}

std::string svg_sheet(const SvgSheet& sheet, std::string_view content) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "role=\"img\" font-family=\"'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif\" font-size=\"13\">\n"
      "<title>{2}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{3}</svg>\n",
      sheet.width, sheet.height, escape_markup(sheet.title), content);
}

double round_step(double least) {
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  }
  return 10.0 * power;
}

}  // namespace phalanx
