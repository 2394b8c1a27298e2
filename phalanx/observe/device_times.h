// When a device worked on an operation, as its events tell.
#pragma once

#include <cstdint>

namespace phalanx::observe {

/// Microseconds since the epoch.
struct DeviceTimes {
  std::int64_t started_us = 0;  // 0: unknown
  std::int64_t ended_us = 0;
  std::int64_t wait_from_us = 0;  // from here to the end a stream stood still for it; 0: none did
};

}  // namespace phalanx::observe
