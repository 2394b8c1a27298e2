// Copies of what its reader will not find in a cache anyhow.
//
// An ordinary store to memory that no cache holds first fetches the line that it is about to overwrite, so a copy that
// leaves the caches moves three bytes over the memory bus for each byte copied. A streaming store moves two. For what
// fits in the caches it is the other way round: then whoever reads the result next would have to fetch it from memory.
//
//   stream_copy(output, slot, bytes);   // like memcpy
#pragma once

#include <cstddef>

#include "phalanx/base/cpu.h"

namespace phalanx {

/// Results of this size and more are streamed. They are in no second-level cache, and in the third only beside all else
/// that a program needs there; below, whoever reads the result next would pay for it (docs/benchmarks.md).
inline constexpr std::size_t kStreamBytes = 8U << 20;

/// How much of a collective's result is better streamed: all of a long one; of a shorter one, where the operation's
/// inputs and outputs (`touched` bytes of each of `ranks` ranks) do not fit in three quarters of the cache that the
/// ranks share, as much as is too much for them, so that the rest stays there.
std::size_t streamed_part(std::size_t result, std::size_t touched, int ranks);
/// The same for a given cache.
std::size_t streamed_part(std::size_t result, std::size_t touched, int ranks, const LastLevelCache& cache);

/// The ranges must not overlap. When it returns, the bytes are where any thread that is told so will see them, like
/// those of memcpy. Plain memcpy on machines other than x86-64.
void stream_copy(void* to, const void* from, std::size_t bytes);

/// What stream_copy() does on machines without AVX-512.
void stream_copy_baseline(void* to, const void* from, std::size_t bytes);

}  // namespace phalanx
