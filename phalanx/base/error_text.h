// error_text(): the message of an exception for users, without the names, source locations and stack traces that
// libraries add.
//
//   catch (const std::exception& error) {
//     print(error_text(error));   // "cannot rename a to b: Is a directory", where std::filesystem says it otherwise
//   }
#pragma once

#include <exception>
#include <filesystem>
#include <string>
#include <string_view>

namespace phalanx {

inline std::string error_text(const std::exception& error) {
  std::string_view what = error.what();
  if (const auto* of_file = dynamic_cast<const std::filesystem::filesystem_error*>(&error)) {
    // "filesystem error: cannot rename: Is a directory [a] [b]"
    constexpr std::string_view kOpening = "filesystem error: ";
    if (what.starts_with(kOpening)) what.remove_prefix(kOpening.size());
    std::string text(what.substr(0, what.find(':')));
    if (!of_file->path1().empty()) text += " " + of_file->path1().string();
    if (!of_file->path2().empty()) text += " to " + of_file->path2().string();
    return text + ": " + of_file->code().message();
  }
  // libtorch's: the reason, then where it was raised and the stack.
  return std::string(what.substr(0, what.find("\nException raised from ")));
}

}  // namespace phalanx
