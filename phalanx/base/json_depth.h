// Finds out how deeply JSON text nests, without parsing it.
//
// The JSON library copies and prints values recursively, so a file of 200,000 opening brackets would end the program
// with a stack overflow. Code that reads JSON from outside checks first:
//
//   if (is_json_too_deep(text)) throw DataError(fmt::format("{}: {}", file, kJsonTooDeep));
#pragma once

#include <string_view>

namespace phalanx {

inline constexpr int kMaxJsonDepth = 100;
inline constexpr const char* kJsonTooDeep = "its JSON nests deeper than 100 levels";

/// Counts brackets outside of strings; stops at the first that is too deep.
inline bool is_json_too_deep(std::string_view text, int limit = kMaxJsonDepth) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;  // an escaped quote does not end the string
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > limit) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace phalanx
