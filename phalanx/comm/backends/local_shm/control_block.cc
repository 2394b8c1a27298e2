#include "phalanx/comm/backends/local_shm/control_block.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/comm/futex.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kReasonPatience{50};  // for another rank to write the reason why it gives up

}  // namespace

ControlBlock::ControlBlock(ControlBlockMemory memory, int rank, int size, std::function<std::string(int)> death_reason)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(size),
      seen_(static_cast<std::size_t>(size), 0),
      death_reason_(std::move(death_reason)) {
  PHALANX_ASSERT(0 <= rank && rank < size, "a control block belongs to one of its ranks");
}

void ControlBlock::publish(std::uint64_t round) {
  PHALANX_ASSERT(round == round_ + 1, "a rank publishes its rounds one after the other");
  round_ = round;
  RankControlBlock& mine = of(rank_);
  mine.published.exchange(static_cast<std::uint32_t>(round), std::memory_order_seq_cst);
  if (mine.published_sleepers.load(std::memory_order_seq_cst) != 0)
    futex_wake_all(&mine.published, memory_.process_shared);
}

bool ControlBlock::look(int peer, std::uint64_t round) {
  // The word holds the low 32 bits of the round. A peer is never 2^31 rounds away.
  std::uint64_t& seen = seen_[static_cast<std::size_t>(peer)];
  const std::uint32_t word = of(peer).published.load(std::memory_order_acquire);
  const std::uint32_t step = word - static_cast<std::uint32_t>(seen);
  PHALANX_ASSERT(step < (1U << 31), "a peer's round went back, or is 2^31 rounds away");
  seen += step;
  return seen >= round;
}

void ControlBlock::abort(const std::string& reason) noexcept {
  ControlBlockHeader& head = *memory_.head;
  std::uint32_t none = 0;
  if (!head.abort_state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    // The rank that writes may have been killed or stopped in the middle; then this rank's reason is used.
    const auto patience = std::chrono::steady_clock::now() + kReasonPatience;
    while (head.abort_state.load(std::memory_order_acquire) == 1 && std::chrono::steady_clock::now() < patience)
      std::this_thread::yield();
    if (head.abort_state.load(std::memory_order_acquire) == 2) return;
  }
  head.reason_bytes = static_cast<std::uint32_t>(std::min(reason.size(), head.reason.size()));
  std::memcpy(head.reason.data(), reason.data(), head.reason_bytes);
  head.abort_state.store(2, std::memory_order_seq_cst);
  for (int peer = 0; peer < size_; ++peer) {
    futex_wake_all(&of(peer).published, memory_.process_shared);
    ring(of(peer).channel_signal, of(peer).channel_sleepers, memory_.process_shared);
  }
}

void ControlBlock::throw_if_aborted() const {
  if (!aborted()) return;
  const ControlBlockHeader& head = *memory_.head;
  const std::string_view reason(head.reason.data(), std::min<std::size_t>(head.reason_bytes, head.reason.size()));
  throw CommError(fmt::format("the group was aborted: {}", reason));
}

bool ControlBlock::misses_abort(int rank, std::uint64_t round) const noexcept {
  // Read-modify-write: in a single total order with the rank's publishing and its look at the abort.
  const std::uint32_t word = of(rank).published.fetch_add(0, std::memory_order_seq_cst);
  return static_cast<std::int32_t>(word - static_cast<std::uint32_t>(round)) >= 0;
}

void ControlBlock::leave() noexcept {
  of(rank_).left_in.store(static_cast<std::uint32_t>(round_), std::memory_order_release);
  publish(round_ + 1);
}

void ControlBlock::throw_if_left(std::uint64_t round) const {
  if (!aborted()) return;
  for (int peer = 0; peer < size_; ++peer)
    if (of(peer).left_in.load(std::memory_order_acquire) == static_cast<std::uint32_t>(round)) throw_if_aborted();
}

void ControlBlock::throw_dead(int rank, const std::string& death_reason) const {
  throw CommError(fmt::format("rank {} {}", name_of(rank), death_reason));
}

void ControlBlock::check_ranks() const {
  throw_if_aborted();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::string why = death_reason(peer);
    if (why.empty()) continue;
    throw_if_aborted();  // a reason that it gave before it ended takes precedence
    throw_dead(peer, why);
  }
}

}  // namespace phalanx
