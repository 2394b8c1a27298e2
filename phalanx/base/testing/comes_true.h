// For tests: waits for something that nothing reports, such as the state of another process
// or of another thread's work.
//
//   EXPECT_TRUE(comes_true([&] { return std::filesystem::exists(path); }));
#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include "phalanx/base/testing/under_sanitizer.h"

namespace phalanx {

/// Looks every 2 ms. True once the condition holds, false after a minute, or ten under a sanitizer.
inline bool comes_true(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kSlowdown * std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace phalanx
