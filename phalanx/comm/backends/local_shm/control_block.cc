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
  PHALANX_ASSERT(round > round_, "round numbers only grow");
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

std::string ControlBlock::abort_reason() const {
  const ControlBlockHeader& head = *memory_.head;
  return std::string(head.reason.data(), std::min<std::size_t>(head.reason_bytes, head.reason.size()));
}

void ControlBlock::throw_if_aborted() const {
  if (aborted()) throw CommError(fmt::format("the group was aborted: {}", abort_reason()));
}

void ControlBlock::check_ranks() const {
  throw_if_aborted();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::string why = death_reason(peer);
    if (why.empty()) continue;
    throw_if_aborted();  // a reason that it gave before it ended takes precedence
    throw CommError(fmt::format("rank {} {}", name_of(peer), why));
  }
}

RoundOperation::RoundOperation(ControlBlock& control_block, const OperationDescription& description)
    : control_block_(control_block), description_(description), first_round_(control_block.round() + 1) {
  control_block.throw_if_aborted();
}

bool RoundOperation::await_all(std::uint64_t round) {
  const int behind = control_block_.first_behind(round);
  if (behind < 0) return true;
  blocked_on_ = behind;
  blocked_round_ = round;
  return false;
}

bool RoundOperation::await(int peer, std::uint64_t round) {
  if (peer == control_block_.rank() || control_block_.reached(peer, round)) return true;
  blocked_on_ = peer;
  blocked_round_ = round;
  return false;
}

Progress RoundOperation::advance() {
  const auto blocked = [this] {
    // reached() is checked again after the abort: if a peer failed because of what all ranks published, this rank finds
    // the same error itself.
    if (!ignores_abort_ && control_block_.aborted() && !control_block_.reached(blocked_on_, blocked_round_))
      control_block_.throw_if_aborted();
    return Progress::blocked;
  };
  switch (state_) {
    case State::open: {
      if (!await_all(first_round_ - 1)) return blocked();
      PHALANX_ASSERT(control_block_.round() + 1 == first_round_, "operations of a rank begin in order");
      RoundHeader& header = control_block_.header(control_block_.rank(), first_round_);
      header.signature = signature_of(description_);
      header.description = &description_;
      header.window = header.offset = 0;
      write_first_round();
      control_block_.publish(first_round_);
      state_ = State::compare;
      [[fallthrough]];
    }
    case State::compare:
      if (!await_all(first_round_)) return blocked();
      compare_signatures();
      if (starts_again()) {
        ++first_round_;
        write_first_round();
        control_block_.publish(first_round_);
        state_ = State::again;
        return Progress::moved;
      }
      state_ = State::work;
      return advance();
    case State::again:
      if (!await_all(first_round_)) return blocked();
      throw_if_left(first_round_ - 1);
      state_ = State::work;
      [[fallthrough]];
    case State::work: {
      const Progress progress = step();
      return progress == Progress::blocked ? blocked() : progress;
    }
  }
  return Progress::done;
}

void RoundOperation::compare_signatures() {
  const Signature& mine = control_block_.header(control_block_.rank(), first_round_).signature;
  bool equal = true;
  for (int peer = 0; peer < control_block_.size(); ++peer)
    equal &= control_block_.header(peer, first_round_).signature == mine;
  if (equal) return;
  std::vector<Signature> all;
  for (int peer = 0; peer < control_block_.size(); ++peer)
    all.push_back(control_block_.header(peer, first_round_).signature);
  require_equal_signatures(all);
}

void RoundOperation::throw_if_left(std::uint64_t round) const {
  if (!control_block_.aborted()) return;
  for (int peer = 0; peer < control_block_.size(); ++peer)
    if (control_block_.of(peer).left_in.load(std::memory_order_acquire) == static_cast<std::uint32_t>(round))
      control_block_.throw_if_aborted();
}

std::optional<Doorbell> RoundOperation::doorbell() {
  if (blocked_on_ < 0) return std::nullopt;
  return control_block_.doorbell(blocked_on_);
}

std::vector<int> RoundOperation::missing_ranks() {
  std::vector<int> missing;
  for (int peer = 0; peer < control_block_.size(); ++peer)
    if (peer != control_block_.rank() && !control_block_.reached(peer, blocked_round_)) missing.push_back(peer);
  return missing;
}

void RoundOperation::check_peers() {
  for (int peer : missing_ranks()) {
    const std::string why = control_block_.death_reason(peer);
    // It may have published its last round just before it ended.
    if (!why.empty() && !control_block_.reached(peer, blocked_round_)) {
      // A rank that failed and ended wrote its reason first: that is the cause, its end is only a consequence.
      if (!ignores_abort_) control_block_.throw_if_aborted();
      throw CommError(fmt::format("rank {} {}", control_block_.name_of(peer), why));
    }
    // The stall reason is read before reached(): a rank that completed this operation may wait in its next one.
    const std::string stuck = control_block_.stall_reason(peer);
    if (!stuck.empty() && !control_block_.reached(peer, blocked_round_))
      throw CommError(fmt::format("the ranks do not call the same operation: {}", stuck));
  }
}

}  // namespace phalanx
