// For tests that limit the memory of a process. AddressSanitizer and ThreadSanitizer map terabytes, so that no such limit
// holds.
//
//   if (kMapsTerabytes) GTEST_SKIP() << kWhyNoMemoryLimit;
#pragma once

namespace phalanx {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kMapsTerabytes = true;
#else
inline constexpr bool kMapsTerabytes = false;
#endif
inline constexpr char kWhyNoMemoryLimit[] = "a sanitizer maps terabytes: the memory of the process cannot be limited";

}  // namespace phalanx
