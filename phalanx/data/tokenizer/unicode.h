// The three classes of characters in split patterns: \p{L}, \p{N} and \s.
//
// The classes are those of the `tokenizers` Python package (unicode_ranges.inc), not of the installed PCRE2, so that
// ids are the same on every machine.
#pragma once

#include <cstdint>

namespace phalanx::data {

enum class CharClass : std::uint8_t { other, letter, number, space };

/// The class of a code point; other if the code point does not exist.
CharClass class_of(std::uint32_t code_point);

/// \w as the package defines it: letters, marks, decimal and letter numbers, connectors, joiners.
bool is_word(std::uint32_t code_point);

}  // namespace phalanx::data
