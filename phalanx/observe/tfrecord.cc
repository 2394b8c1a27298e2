#include "phalanx/observe/tfrecord.h"

#include <array>

namespace phalanx::observe {
namespace {

constexpr std::array<std::uint32_t, 256> make_crc32c_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0U);
    table[byte] = crc;
  }
  return table;
}

void append_little_endian(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

}  // namespace

std::uint32_t crc32c(std::string_view data) {
  static constexpr std::array<std::uint32_t, 256> kTable = make_crc32c_table();
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const char c : data) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFFU];
  return crc ^ 0xFFFFFFFFU;
}

void append_tfrecord(std::string& out, std::string_view data) {
  std::string length;
  append_little_endian(length, data.size(), 8);
  out += length;
  append_little_endian(out, masked(crc32c(length)), 4);
  out += data;
  append_little_endian(out, masked(crc32c(data)), 4);
}

}  // namespace phalanx::observe
