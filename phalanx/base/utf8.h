// Characters and their bytes in UTF-8.
//
//   for (std::size_t at = 0; at < text.size();) {
//     const Utf8Char c = first_char(text.substr(at));      // text: a std::string_view
//     at += c.length > 0 ? c.length : 1;                   // skips a byte that belongs to no character
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace phalanx {

struct Utf8Char {
  std::uint32_t code_point = 0;
  int length = 0;  // in bytes; 0 if the bytes here are not a valid character
};

/// The character at the start of `text`. Overlong forms and surrogates are not valid.
/// REQUIRES: `text` is not empty.
Utf8Char first_char(std::string_view text);

/// The character at the end of `text`.
/// REQUIRES: `text` is not empty.
Utf8Char last_char(std::string_view text);

/// The number of bytes at the end of `text`, 0 to 3, that begin a character and that more bytes could complete.
std::size_t unfinished_tail(std::string_view text);

/// True if all of `text` is valid UTF-8.
bool is_utf8(std::string_view text);

void append_utf8(std::uint32_t code_point, std::string& out);

}  // namespace phalanx
