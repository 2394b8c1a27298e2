// TFRecord framing, and the checksum it uses.
//
// A record: length (8 bytes, little-endian), masked CRC-32C of the length, the
// data, masked CRC-32C of the data.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace phalanx::observe {

/// CRC with the Castagnoli polynomial, reflected 0x82F63B78;
/// crc32c("123456789") is 0xE3069283.
std::uint32_t crc32c(std::string_view data);

/// TFRecord's masking: a checksum stored beside data that contains checksums
/// must look different.
constexpr std::uint32_t masked(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U; }

void append_tfrecord(std::string& out, std::string_view data);

}  // namespace phalanx::observe
