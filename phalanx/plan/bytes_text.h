// Formats bytes for people. The argument may be negative, like a difference; it is then shown as 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "phalanx/base/human.h"

namespace phalanx::plan {

inline std::string bytes_text(std::int64_t bytes) {
  return human_bytes(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0)));
}

}  // namespace phalanx::plan
