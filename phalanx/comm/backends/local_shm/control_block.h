// ControlBlock: the control plane of the local and the shm backend. Through it each rank publishes its progress.
//
// All collectives consist of rounds. In a round a rank may write data where its peers can read them; then it publishes
// the round's number. A peer that sees the number may read the data. Round numbers only grow. All ranks agree on them,
// because the signature (in the header of an operation's first round) determines how many rounds an operation has.
//
// Memory ordering. `published` is stored (seq_cst) after all plain writes of the round, and loaded (acquire) before any
// read of them. So a reader that sees round t sees everything written for it. The store is sequentially consistent, not
// merely a release, only because of the sleeper count (futex.h).
//
// Reuse rule. A rank's data of round t (its header, its slot) goes into one of kBuffers = 3 buffers: buffer t mod 3.
//   1. A peer reads the data of round t only before it publishes t + 2.
//   2. A rank writes for round t only when it has seen every peer publish t - 1.
// So when round t overwrites the data of round t - 3, every peer has published (t - 3) + 2 and no longer reads them.
// Both rules hold across operations, because round numbers continue. So no operation needs a barrier at its end.
//
// Failures. abort() writes one reason for the whole group, once; blocked ranks look at it. A rank that has seen all it
// waits for finishes its operation even if the group is aborted by then.
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

inline constexpr int kBuffers = 3;
inline constexpr std::size_t kCacheLine = 64;

struct alignas(kCacheLine) RoundHeader {
  Signature signature;
  const OperationDescription* description = nullptr;  // local backend only: peers read buffers through it
  // shm only: the window that holds the buffer which peers may access (0: none), and its byte offset in this rank's
  // part.
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
  std::string abort_reason() const;
  void throw_if_aborted() const;
  void check_ranks() const;  // Backend::check_ranks()
  std::string death_reason(int rank) const { return death_reason_ ? death_reason_(rank) : std::string(); }
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

/// The base of collectives that are sequences of rounds. The first round compares signatures.
class RoundOperation : public Operation {
 public:
  RoundOperation(ControlBlock& control_block, const OperationDescription& description);
  Progress advance() final;
  std::optional<Doorbell> doorbell() final;
  void check_peers() final;
  std::vector<int> missing_ranks() final;

 protected:
  /// The next piece of work after the signatures agreed. first_round_ is the round that carried them.
  virtual Progress step() = 0;
  /// Called before the first round is published. It may already write data for that round.
  virtual void write_first_round() {}
  /// Called once the signatures agree. True: the operation continues as if the next round were its first, without
  /// signatures; first_round_ then is that round. All ranks must return the same.
  virtual bool starts_again() { return false; }

  /// False: records which rank is awaited; advance() should then return blocked.
  bool await_all(std::uint64_t round);
  bool await(int peer, std::uint64_t round);
  /// Throws if the group was aborted and a rank published `round` + 1 only because it gave up.
  void throw_if_left(std::uint64_t round) const;
  bool has_published() const noexcept { return state_ != State::open; }

  ControlBlock& control_block_;
  const OperationDescription& description_;
  std::uint64_t first_round_;
  bool ignores_abort_ = false;  // peers use our buffers: leave only when they have said that they are done

 private:
  enum class State : std::uint8_t { open, compare, again, work };
  void compare_signatures();

  State state_ = State::open;
  int blocked_on_ = -1;
  std::uint64_t blocked_round_ = 0;
};

}  // namespace phalanx
