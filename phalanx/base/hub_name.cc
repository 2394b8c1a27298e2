#include "phalanx/base/hub_name.h"

#include <fmt/format.h>

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
  std::error_code error;  // the owner's folder exists: a path with a typo in its last part
  return !std::filesystem::exists(path.substr(0, slash), error);
}

std::string hub_hint(std::string_view path) {
  const bool is_address = path.find("://") != std::string_view::npos;
  if (!is_address && !is_hub_name(path)) return "";
  return fmt::format(
      ": it looks like {}, from which nothing is downloaded: fetch it first (huggingface-cli download NAME --local-dir "
      "DIR) and give the path of that directory",
      is_address ? "an address" : "a name on the Hugging Face hub");
}

bool is_lfs_pointer(std::string_view head) { return head.starts_with("version https://git-lfs.github.com/spec/"); }

}  // namespace phalanx
