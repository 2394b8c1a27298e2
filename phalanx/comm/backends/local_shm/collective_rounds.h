// CollectiveRounds: what one rank does in each round of one collective: what it writes, and what it reads from whom.
// round_operation.h drives it, and tells how rounds work and why a slot may be written again. Round 0 is the first.
//
//     write(t)       before this rank publishes round t. All it awaits have published round t - 1.
//     copy_own(t)    while its peers write round t (all_gather only)
//     read(t)        after it has published round t + 1, or all rounds. All it awaits have published round t.
//
// SLOTS (slot_rounds.cc). A message of any size goes through slots of a fixed size in pieces.
//   all_reduce, reduce. Up to 16 KiB there is one round: every rank writes its whole tensor, and reduces everything
// itself. A longer tensor is cut into chunks, and each chunk into a slice per rank. A chunk takes three rounds, which
// it shares with the chunks before and after it, so it costs one wait. In write(t) a rank
//     1. copies the results of chunk t - 2 out of the slots of the ranks that reduced them,
//     2. reduces its slice of chunk t - 1. It reads its own tensor, and the peers' slots of round t - 1. It writes the
//        result to its tensor, and to its own slot of round t - 1.
//        No peer reads that slice before round t is published,
//     3. writes chunk t, except its own slice, into its slot of round t.
// What a rank reduces itself is copied neither in nor out. With three chunks:
//
//     round          0         1         2         3         the end
//     write chunk    0         1         2
//     reduce                   0         1         2
//     copy results                       0         1         2
//
//   The others. In round t a rank writes piece t of each part that it gives (collective_parts.h), and then reads piece
// t - 1 of each part that it takes. reduce_scatter sums what it reads, in the order of ranks.
//
// DIRECT (direct_rounds.cc). There are two rounds. All work is done in write(1). No two ranks write to the same place.
//   all_reduce       A rank reduces its slice of all tensors, in rank order, and writes the result to every rank. No
//                    other rank accesses that slice, so results may replace inputs in place.
//   reduce           the same, but it writes the result to root only
//   reduce_scatter   A rank reduces its part of all inputs, in rank order, into its output.
//   broadcast        Ranks copy root's tensor. Root has nothing to fetch, so it writes a share of each other rank's
//                    tensor, as large as the share that each of them fetches.
//   the others       A rank copies what it takes out of its peers' buffers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "phalanx/comm/backends/local_shm/control_block.h"
#include "phalanx/comm/backends/local_shm/shm_segment.h"

namespace phalanx {

inline constexpr int kAll = -1;  // in the place of a rank

class CollectiveRounds {
 public:
  virtual ~CollectiveRounds() = default;
  /// False: a bounded piece of it is done; call again.
  virtual bool write(std::size_t round) = 0;
  virtual void copy_own(std::size_t) {}
  virtual void read(std::size_t round) = 0;

  std::size_t count() const { return count_; }
  /// The rank to await before a round but the first is written, and before the last one is read. kAll: every rank; this
  /// rank itself: none. A rank that writes nothing need not see that the slots are free.
  int awaited_to_write() const { return awaited_to_write_; }
  int awaited_to_read() const { return awaited_to_read_; }

 protected:
  std::size_t count_ = 1;
  int awaited_to_write_ = kAll;
  int awaited_to_read_ = kAll;
};

/// Holds the rounds of a collective in its operation's memory: a small one should not pay for another allocation.
class RoundsHolder {
 public:
  RoundsHolder() = default;
  ~RoundsHolder() { clear(); }
  RoundsHolder(const RoundsHolder&) = delete;
  RoundsHolder& operator=(const RoundsHolder&) = delete;

  template <class Rounds, class... Arguments>
  void emplace(Arguments&&... arguments) {
    static_assert(sizeof(Rounds) <= sizeof(memory_));
    clear();
    rounds_ = new (memory_.data()) Rounds(std::forward<Arguments>(arguments)...);
  }
  CollectiveRounds* operator->() const { return rounds_; }

 private:
  void clear() {
    if (rounds_) std::destroy_at(std::exchange(rounds_, nullptr));
  }

  alignas(std::max_align_t) std::array<std::byte, 320> memory_;
  CollectiveRounds* rounds_ = nullptr;
};

/// A rank's buffers, as addresses in this rank's process.
struct RankBuffers {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;                               // all_reduce, reduce, broadcast
  const std::vector<std::int64_t>* input_counts = nullptr;   // uneven all_to_all
  const std::vector<std::int64_t>* output_counts = nullptr;  // uneven all_to_all
};

// Both are for any collective verb. REQUIRES: what is passed by reference outlives the rounds.
void make_slot_rounds(RoundsHolder& rounds, const OperationDescription& description, ControlBlock& control_block,
                      const ShmSegment& segment, std::uint64_t first_round);
/// ranks[r]: the buffers of rank r. If the counts of an uneven all_to_all differ, read(1) throws, when no peer reads
/// this rank's description any more.
void make_direct_rounds(RoundsHolder& rounds, const OperationDescription& description, int rank,
                        std::vector<RankBuffers> ranks);

}  // namespace phalanx
