// For tests that AddressSanitizer or ThreadSanitizer slow down, or that limit the memory of a process: the two map
// terabytes, so that no such limit holds.
//
//   constexpr int kSteps = kUnderSanitizer ? 2'000 : 20'000;
//   constexpr std::chrono::seconds kLimit = kSlowdown * 60s;
//   if (kUnderSanitizer) GTEST_SKIP() << kWhyNoMemoryLimit;
#pragma once

namespace phalanx {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderSanitizer = true;
#else
inline constexpr bool kUnderSanitizer = false;
#endif
/// How many times as long something may take before a test calls it late or hung.
inline constexpr int kSlowdown = kUnderSanitizer ? 10 : 1;
inline constexpr char kWhyNoMemoryLimit[] = "a sanitizer maps terabytes: the memory of the process cannot be limited";

}  // namespace phalanx
