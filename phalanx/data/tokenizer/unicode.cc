#include "phalanx/data/tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

namespace phalanx::data {
namespace {

struct CodePointRange {
  std::uint32_t first;
  std::uint32_t last;
};
#include "phalanx/data/tokenizer/unicode_ranges.inc"

constexpr std::uint32_t kBasicPlane = 0x10000;

template <std::size_t N>
bool within(const CodePointRange (&ranges)[N], std::uint32_t code_point) {
  const auto after = std::upper_bound(std::begin(ranges), std::end(ranges), code_point,
                                      [](std::uint32_t c, const CodePointRange& range) { return c < range.first; });
  return after != std::begin(ranges) && code_point <= std::prev(after)->last;
}

/// One byte for each code point of the basic multilingual plane, which has nearly all text.
std::vector<CharClass> make_basic_plane() {
  std::vector<CharClass> table(kBasicPlane, CharClass::other);
  const auto mark = [&](std::span<const CodePointRange> ranges, CharClass value) {
    for (const CodePointRange& range : ranges) {
      for (std::uint32_t c = range.first; c <= std::min(range.last, kBasicPlane - 1); ++c) table[c] = value;
    }
  };
  mark(kLetterRanges, CharClass::letter);
  mark(kNumberRanges, CharClass::number);
  mark(kSpaceRanges, CharClass::space);
  return table;
}

}  // namespace

CharClass class_of(std::uint32_t code_point) {
  static const std::vector<CharClass> basic_plane = make_basic_plane();
  if (code_point < kBasicPlane) return basic_plane[code_point];
  if (within(kLetterRanges, code_point)) return CharClass::letter;
  if (within(kNumberRanges, code_point)) return CharClass::number;
  return CharClass::other;
}

bool is_word(std::uint32_t code_point) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code_point))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      break;
  }
  // Circled and squared letters are alphabetic signs.
  constexpr CodePointRange kOthers[] = {
      {0x200C, 0x200D}, {0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};
  return within(kOthers, code_point);
}

}  // namespace phalanx::data
