// Copies with streaming (non-temporal) stores, for data that will not be in a cache when it is read.
//
// An ordinary store to uncached memory first fetches the line that it will overwrite. So a copy that exceeds the caches
// moves three bytes over the memory bus for each byte copied. A streaming store moves two. For data that fits into the
// caches streaming is worse: the next reader would have to fetch it from memory.
//
//   stream_copy(output, slot, bytes);   // like memcpy
#pragma once

#include <cstddef>

#include "phalanx/base/cpu.h"

namespace phalanx {

/// Results of at least this size are streamed. They do not fit into the second-level cache, and in the third they would
/// compete with everything else the program needs. Below this size the next reader would pay for it
/// (benchmarks/results/copy_strategies.md).
inline constexpr std::size_t kStreamBytes = 8U << 20;

/// How many bytes of a collective's result should be streamed. A result of kStreamBytes or more: all of it. A shorter
/// one: the excess over three quarters of the cache that the ranks share, if the operation's inputs and outputs
/// (`touched` bytes of each of `ranks` ranks) do not fit into that. The rest stays in the cache.
std::size_t streamed_part(std::size_t result, std::size_t touched, int ranks);
/// The same for a given cache.
std::size_t streamed_part(std::size_t result, std::size_t touched, int ranks, const LastLevelCache& cache);

/// Plain memcpy on CPUs other than x86-64.
/// REQUIRES: the ranges do not overlap.
/// ENSURES: on return the bytes are visible to any thread that synchronises with this one, as after memcpy.
void stream_copy(void* to, const void* from, std::size_t bytes);

/// What stream_copy() does on CPUs without AVX-512.
void stream_copy_baseline(void* to, const void* from, std::size_t bytes);

}  // namespace phalanx
