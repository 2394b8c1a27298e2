#include "phalanx/base/json_lines.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/error.h"

namespace phalanx {

void each_line(std::string_view text, const std::string& name,
               const std::function<void(std::string_view line, const std::string& where)>& use) {
  text = text_after_mark<DataError>(text, name);
  for (std::size_t number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.find_first_not_of(" \t\v\f\r") != std::string_view::npos)
      use(line, fmt::format("{}, line {}", name, number));
  }
}

std::string no_line_left(const std::string& name, const std::string& what, const std::vector<std::string>& skipped) {
  std::string none = fmt::format("{} holds no {}", name, what);
  if (skipped.empty()) return none;
  return fmt::format("{}: {} skipped, {}{}", none, skipped.size() == 1 ? "its line is" : "all its lines are",
                     skipped.size() == 1 ? "" : "the first because of ", skipped.front());
}

}  // namespace phalanx
