// PHALANX_ASSERT: an invariant of our own code, such as the order in which threads may touch a ring.
//
// Checked in debug and sanitizer builds (where NDEBUG is not defined); a release build does not evaluate the condition.
// A failure prints the condition, its place and the text, and aborts the process: it is a fault of Phalanx, not of its
// caller. What a caller can get wrong throws an Error (error.h).
//
//   PHALANX_ASSERT(head - tail <= kSlots, "the sender overtook the receiver");
#pragma once

#ifdef NDEBUG
#define PHALANX_ASSERT(condition, text) static_cast<void>(sizeof((condition) ? 1 : 0))
#else
#define PHALANX_ASSERT(condition, text) \
  static_cast<void>((condition) ? 0 : (::phalanx::fail_assertion(#condition, __FILE__, __LINE__, text), 0))
#endif

namespace phalanx {

[[noreturn]] void fail_assertion(const char* condition, const char* file, int line, const char* text) noexcept;

}  // namespace phalanx
