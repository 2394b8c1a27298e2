// Checks that a JSON value is a whole number that fits into 64 bits. The JSON library silently converts floats to
// integers, and the largest integers to negative ones.
//
//   if (!is_whole_number(value)) throw DataError(...);
//   const auto tokens = value.get<std::int64_t>();
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>

namespace phalanx {

inline bool is_whole_number(const nlohmann::json& value) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  return value.is_number_integer() && !(value.is_number_unsigned() && value.get<std::uint64_t>() > kMost);
}

}  // namespace phalanx
