#include "phalanx/comm/backends/local_shm/board.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/comm/futex.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kReasonPatience{50};  // for another rank to write down why it gives up

}  // namespace

Board::Board(BoardMemory memory, int rank, int size, std::function<std::string(int)> why_dead)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(size),
      seen_(static_cast<std::size_t>(size), 0),
      why_dead_(std::move(why_dead)) {}

void Board::publish(std::uint64_t round) {
  round_ = round;
  RankBoard& mine = of(rank_);
  mine.published.exchange(static_cast<std::uint32_t>(round), std::memory_order_seq_cst);
  if (mine.published_sleepers.load(std::memory_order_seq_cst) != 0)
    futex_wake_all(&mine.published, memory_.process_shared);
}

bool Board::look(int peer, std::uint64_t round) {
  // The word holds the low half of the round. A peer is never 2^31 rounds away.
  std::uint64_t& seen = seen_[static_cast<std::size_t>(peer)];
  const std::uint32_t word = of(peer).published.load(std::memory_order_acquire);
  seen += word - static_cast<std::uint32_t>(seen);
  return seen >= round;
}

void Board::abort(const std::string& reason) noexcept {
  BoardHead& head = *memory_.head;
  std::uint32_t none = 0;
  if (!head.abort_state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    // Whoever writes may have been killed or stopped in the middle; then the reason is this one.
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
    ring(of(peer).mail, of(peer).mail_sleepers, memory_.process_shared);
  }
}

std::string Board::abort_reason() const {
  const BoardHead& head = *memory_.head;
  return std::string(head.reason.data(), std::min<std::size_t>(head.reason_bytes, head.reason.size()));
}

void Board::throw_if_aborted() const {
  if (aborted()) throw CommError(fmt::format("the group was aborted: {}", abort_reason()));
}

void Board::check_ranks() const {
  throw_if_aborted();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const std::string why = why_dead(peer);
    if (why.empty()) continue;
    throw_if_aborted();  // its reason, if it gave one, comes before its end
    throw CommError(fmt::format("rank {} {}", name_of(peer), why));
  }
}

RoundOperation::RoundOperation(Board& board, const OperationDescription& description)
    : board_(board), description_(description), first_round_(board.round() + 1) {
  board.throw_if_aborted();
}

bool RoundOperation::await_all(std::uint64_t round) {
  const int behind = board_.first_behind(round);
  if (behind < 0) return true;
  blocked_on_ = behind;
  blocked_round_ = round;
  return false;
}

bool RoundOperation::await(int peer, std::uint64_t round) {
  if (peer == board_.rank() || board_.reached(peer, round)) return true;
  blocked_on_ = peer;
  blocked_round_ = round;
  return false;
}

Progress RoundOperation::advance() {
  const auto blocked = [this] {
    // Seen again after the abort: if a peer failed because of what it saw of all ranks, so do we, in our own words.
    if (!ignores_abort_ && board_.aborted() && !board_.reached(blocked_on_, blocked_round_)) board_.throw_if_aborted();
    return Progress::blocked;
  };
  switch (state_) {
    case State::open: {
      if (!await_all(first_round_ - 1)) return blocked();
      RoundHeader& header = board_.header(board_.rank(), first_round_);
      header.signature = signature_of(description_);
      header.description = &description_;
      header.window = header.offset = 0;
      write_first_round();
      board_.publish(first_round_);
      state_ = State::compare;
      [[fallthrough]];
    }
    case State::compare:
      if (!await_all(first_round_)) return blocked();
      compare_signatures();
      if (starts_again()) {
        ++first_round_;
        write_first_round();
        board_.publish(first_round_);
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
  const Signature& mine = board_.header(board_.rank(), first_round_).signature;
  bool equal = true;
  for (int peer = 0; peer < board_.size(); ++peer) equal &= board_.header(peer, first_round_).signature == mine;
  if (equal) return;
  std::vector<Signature> all;
  for (int peer = 0; peer < board_.size(); ++peer) all.push_back(board_.header(peer, first_round_).signature);
  require_equal_signatures(all);
}

void RoundOperation::throw_if_left(std::uint64_t round) const {
  if (!board_.aborted()) return;
  for (int peer = 0; peer < board_.size(); ++peer)
    if (board_.of(peer).left_in.load(std::memory_order_acquire) == static_cast<std::uint32_t>(round))
      board_.throw_if_aborted();
}

std::optional<Doorbell> RoundOperation::doorbell() {
  if (blocked_on_ < 0) return std::nullopt;
  return board_.doorbell(blocked_on_);
}

std::vector<int> RoundOperation::missing_ranks() {
  std::vector<int> missing;
  for (int peer = 0; peer < board_.size(); ++peer)
    if (peer != board_.rank() && !board_.reached(peer, blocked_round_)) missing.push_back(peer);
  return missing;
}

void RoundOperation::check_peers() {
  for (int peer : missing_ranks()) {
    const std::string why = board_.why_dead(peer);
    // It may have published its last round just before it ended.
    if (!why.empty() && !board_.reached(peer, blocked_round_)) {
      // A rank that failed and ended wrote its reason first: that is the cause, its end only what follows.
      if (!ignores_abort_) board_.throw_if_aborted();
      throw CommError(fmt::format("rank {} {}", board_.name_of(peer), why));
    }
    // Asked first, looked at afterwards: a rank that has been through this operation may wait for its next one.
    const std::string stuck = board_.why_stuck(peer);
    if (!stuck.empty() && !board_.reached(peer, blocked_round_))
      throw CommError(fmt::format("the ranks do not call the same operation: {}", stuck));
  }
}

}  // namespace phalanx
