// UTF-8 and the three classes of characters that split patterns speak of: \p{L}, \p{N} and \s.
//
// The classes are those of the `tokenizers` Python package (unicode_ranges.inc), not of the PCRE2 that happens to be
// installed, so that ids do not depend on the machine.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace phalanx::data {

enum class CharClass : std::uint8_t { other, letter, number, space };

/// Class of a code point; other for those that do not exist.
CharClass class_of(std::uint32_t code_point);

/// \w as the package has it: letters, marks, decimal and letter numbers, connectors, joiners.
bool is_word(std::uint32_t code_point);

struct Utf8Char {
  std::uint32_t code_point = 0;
  int length = 0;  // bytes; 0 where the bytes at this place are no valid character
};

/// The character at the start of `text`, which must not be empty. Overlong forms and surrogates are not valid.
Utf8Char first_char(std::string_view text);

/// The character at the end of `text`, which must not be empty.
Utf8Char last_char(std::string_view text);

/// Bytes at the end of `text`, 0 to 3, that begin a character which more bytes could complete.
std::size_t unfinished_tail(std::string_view text);

void append_utf8(std::uint32_t code_point, std::string& out);

}  // namespace phalanx::data
