// The printable alphabet of byte-level BPE, in which tokenizer.json writes arbitrary bytes as text.
//
// A byte that is printable in Latin-1 is written as itself. The other 68 are mapped to U+0100 and up (a space is
// written U+0120, a newline U+010A). This is GPT-2's map, which every byte-level tokenizer.json uses.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx::data {

std::uint32_t code_point_of_byte(std::uint8_t byte);

std::string bytes_to_printable(std::string_view bytes);

/// Returns nothing if a character is outside the alphabet.
std::optional<std::string> printable_to_bytes(std::string_view text);

/// The other notation for a byte, in vocabularies of characters: <0x0A>.
std::string fallback_token(std::uint8_t byte);

/// Returns nothing if `token` is not in this notation. Lower-case digits are accepted too.
std::optional<std::uint8_t> fallback_byte(std::string_view token);

}  // namespace phalanx::data
