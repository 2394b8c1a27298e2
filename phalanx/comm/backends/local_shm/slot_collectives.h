// The collectives of the shm backend through the slots: what a rank writes in each round, and what it reads from whom.
// round_operation.h tells how rounds work and why a slot may be written again. A slot has a fixed size; a message of any
// size goes in pieces.
//
//     write(t)       before this rank publishes round t. All it awaits have published round t - 1.
//     copy_own(t)    while its peers write round t
//     read(t)        after it has published round t + 1, or all rounds. All it awaits have published round t.
//
// ALL_REDUCE and REDUCE. Up to 16 KiB there is one round: every rank writes its whole input, and reduces everything
// itself. A longer tensor is cut into chunks, and each chunk into a slice per rank. A chunk takes three rounds, which it
// shares with the chunks before and behind it, so it costs one wait. In write(t) a rank
//   1. copies the results of chunk t - 2 out of the slots of the ranks that reduced them,
//   2. reduces its slice of chunk t - 1. It reads its own tensor, and the peers' slots of round t - 1. It writes the
//      result to its tensor, and to its own slot of round t - 1. No peer reads that slice before round t is published,
//   3. writes chunk t, except its own slice, into its slot of round t.
// What a rank reduces itself is copied neither in nor out. Two ranks, four chunks:
//
//     round          0         1         2         3         4         the end
//     write chunk    0         1         2         3
//     reduce                   0         1         2         3
//     copy out                           0         1         2         3
//
// THE OTHERS move parts (collective_parts.h). In round t a rank writes piece t of each part that it gives to others, and
// then reads piece t - 1 of each part that it takes. reduce_scatter sums what it reads, in the order of ranks.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "phalanx/comm/backends/local_shm/control_block.h"
#include "phalanx/comm/backends/local_shm/shm_segment.h"

namespace phalanx {

/// The slots that one collective uses. Rounds count from its first.
class Slots {
 public:
  /// All of them outlive this.
  Slots(ControlBlock& control_block, const ShmSegment& segment, std::uint64_t first_round)
      : control_block_(control_block), segment_(segment), first_round_(first_round) {}

  int rank() const { return control_block_.rank(); }
  int size() const { return control_block_.size(); }
  std::size_t bytes() const { return segment_.layout().slot_bytes; }
  /// To write to.
  std::byte* own(std::size_t round) const;
  /// To read from.
  const std::byte* of(int peer, std::size_t round) const;
  /// Calls body(peer), starting with the next rank, so that not all read the same one at once.
  template <class Body>
  void for_each_peer(Body body) const {
    for (int k = 1; k < size(); ++k) body((rank() + k) % size());
  }

 private:
  ControlBlock& control_block_;
  const ShmSegment& segment_;
  std::uint64_t first_round_;
};

inline constexpr int kAll = -1;  // in the place of a rank

/// One rank's part of one collective.
class SlotCollective {
 public:
  virtual ~SlotCollective() = default;
  virtual void write(std::size_t round) = 0;
  virtual void copy_own(std::size_t) {}
  virtual void read(std::size_t round) = 0;

  std::size_t rounds() const { return rounds_; }
  /// The rank to await before a round but the first is written, and before the last one is read. kAll: every rank; this
  /// rank itself: none. A rank that writes nothing need not see that the slots are free.
  int awaited_to_write() const { return awaited_to_write_; }
  int awaited_to_read() const { return awaited_to_read_; }

 protected:
  std::size_t rounds_ = 1;
  int awaited_to_write_ = kAll;
  int awaited_to_read_ = kAll;
};

/// Lies in its operation's memory: a small collective should not pay for another allocation.
struct SlotCollectiveMemory {
  struct Destroy {
    void operator()(SlotCollective* collective) const { std::destroy_at(collective); }
  };
  alignas(std::max_align_t) std::array<std::byte, 256> bytes;
};
using SlotCollectivePointer = std::unique_ptr<SlotCollective, SlotCollectiveMemory::Destroy>;

/// Any collective verb. REQUIRES: the memory and the description outlive the result.
SlotCollectivePointer make_slot_collective(SlotCollectiveMemory& memory, const Slots& slots,
                                           const OperationDescription& description);

}  // namespace phalanx
