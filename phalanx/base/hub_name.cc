#include "phalanx/base/hub_name.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <system_error>

namespace phalanx {

bool is_hub_name(std::string_view path) {
  const auto is_part = [](std::string_view part) {
    const auto is_allowed = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; };
    return !part.empty() && part[0] != '.' && std::ranges::all_of(part, is_allowed);
  };
  const std::size_t slash = path.find('/');
  if (slash == std::string_view::npos) return false;
  if (!is_part(path.substr(0, slash)) || !is_part(path.substr(slash + 1))) return false;
  std::error_code error;  // the owner's folder is there: a path with a slip in its last part
  return !std::filesystem::exists(path.substr(0, slash), error);
}

std::string hub_hint(std::string_view path) {
  if (!is_hub_name(path)) return "";
  return ": it looks like a name on the Hugging Face hub, from which nothing is downloaded; expected the directory of "
         "a "
         "model that has been";
}

}  // namespace phalanx
