// Formats quantities for people: sizes, durations, counts. Three significant digits, the same in every locale.
#pragma once

#include <cstdint>
#include <string>

namespace phalanx {

std::string human_bytes(std::uint64_t bytes);     // "512 B", "1.21 GiB", "64.0 MiB": binary units
std::string human_bytes_per_second(double rate);  // "12.3 MB/s": decimal units, as rates are quoted
std::string human_count(double value);            // "950", "5.03 k", "6.74 M", "1.24 B", "15.0 T": parameters, tokens
std::string human_duration(double seconds);       // "350 us", "45.0 ms", "3.20 s", "2m 05s", "1h 02m", "3d 04h"
std::string with_commas(std::int64_t value);      // "-1,234,567"

}  // namespace phalanx
