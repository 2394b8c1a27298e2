#include "phalanx/data/tokenizer/byte_level.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <system_error>

#include "phalanx/base/utf8.h"

namespace phalanx::data {
namespace {

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

constexpr std::array<std::uint16_t, 256> make_code_points() {
  std::array<std::uint16_t, 256> table{};
  std::uint16_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    table[byte] = stands_for_itself(byte) ? static_cast<std::uint16_t>(byte) : next++;
  }
  return table;
}

constexpr std::array<std::uint16_t, 256> kCodePoints = make_code_points();
constexpr int kAlphabetEnd = 256 + 68;

constexpr std::array<std::int16_t, kAlphabetEnd> make_bytes() {
  std::array<std::int16_t, kAlphabetEnd> table{};
  for (auto& entry : table) entry = -1;
  for (int byte = 0; byte < 256; ++byte) table[kCodePoints[byte]] = static_cast<std::int16_t>(byte);
  return table;
}

constexpr std::array<std::int16_t, kAlphabetEnd> kBytes = make_bytes();

}  // namespace

std::uint32_t code_point_of_byte(std::uint8_t byte) { return kCodePoints[byte]; }

std::string bytes_to_printable(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size() + bytes.size() / 4);
  for (const char byte : bytes) append_utf8(kCodePoints[static_cast<unsigned char>(byte)], out);
  return out;
}

std::optional<std::string> printable_to_bytes(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const Utf8Char c = first_char(text);
    if (c.length == 0 || c.code_point >= kAlphabetEnd || kBytes[c.code_point] < 0) return std::nullopt;
    out += static_cast<char>(kBytes[c.code_point]);
    text.remove_prefix(static_cast<std::size_t>(c.length));
  }
  return out;
}

std::string fallback_token(std::uint8_t byte) { return fmt::format("<0x{:02X}>", byte); }

std::optional<std::uint8_t> fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  std::uint8_t byte = 0;
  const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  if (error != std::errc() || end != token.data() + 5) return std::nullopt;
  return byte;
}

}  // namespace phalanx::data
