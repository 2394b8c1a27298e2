// For tests and scripts: a clock for `strftime_now` that stands still.
#pragma once

#include <ctime>

namespace phalanx::jinja {

/// 2 January 2026, 15:04:05, a Friday.
inline std::tm fixed_clock() {
  std::tm time{};
  time.tm_year = 126;
  time.tm_mday = 2;
  time.tm_hour = 15;
  time.tm_min = 4;
  time.tm_sec = 5;
  time.tm_wday = 5;
  time.tm_yday = 1;
  return time;
}

}  // namespace phalanx::jinja
