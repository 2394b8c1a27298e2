// Futex words: a thread sleeps until another thread, or another process, changes a 32-bit atomic.
//
// All of comm/ uses the same pairing (Dekker's). The sleeper adds itself to a count, then sleeps only if the word still
// holds the value it saw. The waker changes the word, then reads the count. Both sides are sequentially consistent, so
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

/// Sleeps until any of the words changes, at most `limit`. Without doorbells, or with more than one on kernels before
/// 5.16, it sleeps only for a short time, which keeps polling cheap.
void doorbell_wait(std::span<const Doorbell> doorbells, std::chrono::nanoseconds limit);

/// Changes the word and wakes its sleepers.
inline void ring(std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& sleepers, bool process_shared) {
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&word, process_shared);
}

}  // namespace phalanx
