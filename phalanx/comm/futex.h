// Futex words: where a thread sleeps until another thread, or another process, changes a 32-bit atomic.
//
// The pairing used all over comm/ (Dekker's): the sleeper adds itself to a count, then sleeps only if the word still
// holds what it saw; the waker changes the word, then looks at the count. Both sides are sequentially consistent, so
// either the sleeper sees the new word or the waker sees the sleeper.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>

#include "phalanx/comm/backend.h"

namespace phalanx {

/// Sleeps while *word == seen, at most `limit`; may wake early.
void futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t seen, std::chrono::nanoseconds limit,
                bool process_shared);
void futex_wake_all(const std::atomic<std::uint32_t>* word, bool process_shared);

/// Sleeps until any doorbell rings, at most `limit`. Without doorbells, or on kernels before 5.16 with more than one,
/// for a short time that keeps polling cheap.
void doorbell_wait(std::span<const Doorbell> doorbells, std::chrono::nanoseconds limit);

/// Changes the word and wakes whoever sleeps on it.
inline void ring(std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& sleepers, bool process_shared) {
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&word, process_shared);
}

}  // namespace phalanx
