// The three classes of characters that split patterns speak of: \p{L}, \p{N} and \s.
//
// The classes are those of the `tokenizers` Python package (unicode_ranges.inc), not of the PCRE2 that happens to be
// installed, so that ids do not depend on the machine.
#pragma once

#include <cstdint>

namespace phalanx::data {

enum class CharClass : std::uint8_t { other, letter, number, space };

/// Class of a code point; other for those that do not exist.
CharClass class_of(std::uint32_t code_point);

/// \w as the package has it: letters, marks, decimal and letter numbers, connectors, joiners.
bool is_word(std::uint32_t code_point);

}  // namespace phalanx::data
