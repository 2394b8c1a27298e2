// The printable alphabet of byte-level BPE: how tokenizer.json writes arbitrary bytes as text.
//
// A byte that prints in Latin-1 stands for itself; the other 68 are moved up to U+0100 and beyond (a space is written
// U+0120, a newline U+010A). This is GPT-2's map, which every byte-level tokenizer.json uses.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx::data {

std::uint32_t code_point_of_byte(std::uint8_t byte);

std::string bytes_to_printable(std::string_view bytes);

/// Empty where a character is outside the alphabet.
std::optional<std::string> printable_to_bytes(std::string_view text);

}  // namespace phalanx::data
