// ControlBlock: the words that all ranks of a local or shm group see. Each rank publishes here how far it has come, and
// any rank the reason why the group gives up. round_operation.h tells the whole protocol.
//
// MEMORY ORDERING of collectives is stated here, once.
// - publish(t) stores the round after everything that this rank wrote for it. reached(peer, t) loads it (acquire)
//   before anything of the peer is read. So whoever sees round t sees all that was written for it.
// - The store is sequentially consistent, not merely a release. The sleeper count (futex.h) and the abort
//   (misses_abort) each need one order of "I changed my word" and "I looked at yours".
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/signature.h"

namespace phalanx {

inline constexpr int kBuffers = 3;  // headers and slots of each rank: round t uses number t mod 3
inline constexpr std::size_t kCacheLine = 64;

/// What a rank says in the first round of a collective.
struct alignas(kCacheLine) RoundHeader {
  Signature signature;
  const OperationDescription* description = nullptr;  // local backend only: peers read buffers through it
  // shm only: the window that holds the data which peers may access (0: none), and its byte offset in this rank's part.
  std::uint64_t window = 0;
  std::uint64_t offset = 0;
};
static_assert(sizeof(RoundHeader) == kCacheLine);

/// One rank's part of the control block. Only its rank writes it, except for channel_signal and the sleeper counts.
struct alignas(kCacheLine) RankControlBlock {
  alignas(kCacheLine) std::atomic<std::uint32_t> published;           // last round; a futex word
  alignas(kCacheLine) std::atomic<std::uint32_t> published_sleepers;  // peers that sleep on it
  std::atomic<std::uint32_t> left_in;  // first round of the operation whose peers' buffers this rank gave up
  alignas(
      kCacheLine) std::atomic<std::uint32_t> channel_signal;  // changed whenever a channel to or from this rank moves
  alignas(kCacheLine) std::atomic<std::uint32_t> channel_sleepers;
  std::array<RoundHeader, kBuffers> headers;
};

struct alignas(kCacheLine) ControlBlockHeader {
  std::atomic<std::uint32_t> abort_state;  // 0 none, 1 being written, 2 written
  std::uint32_t reason_bytes;
  std::array<char, 4096> reason;
};

/// Zero-filled memory that all ranks see, at any address.
struct ControlBlockMemory {
  ControlBlockHeader* head = nullptr;
  RankControlBlock* ranks = nullptr;
  std::shared_ptr<void> owner;  // keeps the memory mapped
  bool process_shared = false;
};

/// One rank's view of the control block.
class ControlBlock {
 public:
  /// death_reason(rank): empty while that rank lives.
  ControlBlock(ControlBlockMemory memory, int rank, int size, std::function<std::string(int)> death_reason = {});

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  bool process_shared() const noexcept { return memory_.process_shared; }
  RankControlBlock& of(int rank) const noexcept { return memory_.ranks[rank]; }
  RoundHeader& header(int rank, std::uint64_t round) const noexcept {
    return memory_.ranks[rank].headers[round % kBuffers];
  }

  std::uint64_t round() const noexcept { return round_; }  // the last one published here
  void publish(std::uint64_t round);
  /// True once `peer` has published `round`; the data that it wrote for the round may then be read.
  bool reached(int peer, std::uint64_t round) {
    if (seen_[static_cast<std::size_t>(peer)] >= round) return true;
    return look(peer, round);
  }
  /// The first rank that has not reached the round, or -1.
  int first_behind(std::uint64_t round) {
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_ && !reached(peer, round)) return peer;
    return -1;
  }
  Doorbell doorbell(int peer) const {  // after reached(peer, ...) was false
    return {&of(peer).published, static_cast<std::uint32_t>(seen_[static_cast<std::size_t>(peer)]),
            &of(peer).published_sleepers, memory_.process_shared};
  }

  void abort(const std::string& reason) noexcept;
  bool aborted() const noexcept { return memory_.head->abort_state.load(std::memory_order_seq_cst) == 2; }
  void throw_if_aborted() const;
  /// REQUIRES: aborted(). False: the rank has not published `round`, and once it does it sees the abort.
  bool misses_abort(int rank, std::uint64_t round) const noexcept;
  /// This rank gives up the operation that began with round(): it publishes the next round
  /// without having done its part.
  void leave() noexcept;
  /// Throws if the group was aborted and a rank published `round` + 1 only because it gave up.
  void throw_if_left(std::uint64_t round) const;

  void check_ranks() const;  // Backend::check_ranks()
  std::string death_reason(int rank) const { return death_reason_ ? death_reason_(rank) : std::string(); }
  [[noreturn]] void throw_dead(int rank, const std::string& death_reason) const;
  /// Not empty if that rank waits for a message to or from this one, and so cannot arrive at a collective of this
  /// group.
  std::string stall_reason(int rank) const { return stall_reason_ ? stall_reason_(rank) : std::string(); }
  void set_stall_reason(std::function<std::string(int)> stall_reason) { stall_reason_ = std::move(stall_reason); }
  /// The numbers by which error texts call the ranks; empty: 0, 1, ...
  void set_names(std::vector<int> names) { names_ = std::move(names); }
  int name_of(int rank) const { return names_.empty() ? rank : names_[static_cast<std::size_t>(rank)]; }

 private:
  bool look(int peer, std::uint64_t round);

  ControlBlockMemory memory_;
  int rank_;
  int size_;
  std::uint64_t round_ = 0;
  std::vector<std::uint64_t> seen_;
  std::function<std::string(int)> death_reason_;
  std::function<std::string(int)> stall_reason_;
  std::vector<int> names_;
};

}  // namespace phalanx
