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

/// The other way to write a byte, of vocabularies of characters: <0x0A>.
std::string fallback_token(std::uint8_t byte);

/// Empty where `token` is none of these. Lower-case digits count too.
std::optional<std::uint8_t> fallback_byte(std::string_view token);

}  // namespace phalanx::data
