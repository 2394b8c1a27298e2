// RingSchedule: which piece of keys and values is on which rank at which hop of ring attention, and who needs it.
//
// A sequence is cut into 2 * ranks pieces, of which rank r has piece r, its head, and piece 2 * ranks - 1 - r, its tail
// (layout/context_cut.h). Keys and values of a head travel up, from rank r to r + 1 and round. Those of a tail travel
// down, from rank r to r - 1: only the ranks below see them, as queries see what is before them.
//
//   ranks 0 1 2 3, hop 1:   heads of 3 0 1 2,  tails of 1 2 3 -
//                  hop 2:   heads of 2 3 0 1,  tails of 2 3 - -
//
// A piece stops at the last rank that needs it: a causal mask, a window and the documents of all rows say which. All
// ranks work out the same schedule.
//
//   const RingSchedule ring(cut, seq_len, window, documents.get());
//   for (std::int64_t hop = 0; hop <= ring.hops(); ++hop) {
//     if (const auto owner = ring.owner_at(RingSchedule::up, rank, hop)) ...   // whose head is here
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "phalanx/layout/context_cut.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx {

class RingSchedule {
 public:
  enum Way : std::uint8_t { up, down };
  static constexpr std::array<Way, 2> kWays = {up, down};

  /// `seq_len`: of the padded sequences, of which `documents` are; null: each row is one.
  RingSchedule(const ContextCut& cut, std::int64_t seq_len, std::int64_t window, const DocumentBoundaries* documents);

  /// The last hop of any piece; 0: nothing is sent.
  std::int64_t hops() const noexcept { return hops_; }
  /// The last hop of the piece that `owner` sends this way.
  std::int64_t last_hop(Way way, std::int64_t owner) const { return last_hops_[way][static_cast<std::size_t>(owner)]; }
  /// Whose piece is on this rank, if one is.
  std::optional<std::int64_t> owner_at(Way way, std::int64_t rank, std::int64_t hop) const;
  /// The rank that has the owner's piece.
  std::int64_t rank_at(Way way, std::int64_t owner, std::int64_t hop) const;
  /// To which rank pieces go from this rank, and from which they come.
  std::int64_t next(Way way, std::int64_t rank) const { return rank_at(way, rank, 1); }
  std::int64_t previous(Way way, std::int64_t rank) const { return rank_at(way, rank, -1); }

  /// The positions of the owner's piece.
  PositionRange keys(Way way, std::int64_t owner) const;
  /// Those of the rank's pieces that see some of these keys, in increasing order.
  std::vector<PositionRange> queries(Way way, std::int64_t owner, std::int64_t rank) const;

 private:
  std::int64_t piece_of(Way way, std::int64_t rank) const { return ContextCut{.ranks = ranks_}.pieces_of(rank)[way]; }

  std::int64_t ranks_, length_;         // of a piece
  std::vector<std::int64_t> furthest_;  // of each piece: the last piece with queries that see it
  std::array<std::vector<std::int64_t>, 2> last_hops_;
  std::int64_t hops_ = 0;
};

}  // namespace phalanx
