// TFRecord framing and its checksum.
//
// A record consists of the length (8 bytes, little-endian), the masked CRC-32C of the length, the data, and the masked
// CRC-32C of the data.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace phalanx::observe {

/// CRC with the Castagnoli polynomial, reflected 0x82F63B78; crc32c("123456789") is 0xE3069283.
std::uint32_t crc32c(std::string_view data);

/// TFRecord's masking: a checksum that is stored beside data with checksums must look different from them.
constexpr std::uint32_t masked(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U; }

void append_tfrecord(std::string& out, std::string_view data);

}  // namespace phalanx::observe
