// ContextCut: which positions of a sequence each rank of a context-parallel group has. It uses no tensor.
//
// A sequence is cut into 2 * ranks pieces of equal length. Rank r has piece r and piece 2 * ranks - 1 - r: one from the
// head and one from the tail. Late positions see more keys than early ones, so each rank has the same work in causal
// attention.
//
//   4 ranks:   0 | 1 | 2 | 3 | 3 | 2 | 1 | 0
//
// A sequence whose length is no multiple of ranks * `multiple` is padded at its end. Padding has no label, and no token
// before it sees it. With `by_work`, rows that hold several documents are cut otherwise: packed_cut.h.
//
//   const ContextCut cut{.ranks = 4, .rank = 1};
//   cut.padded(30);       // 32
//   cut.pieces_of(1);     // {1, 6}, of 8 pieces
//   cut.ranges(30);       // {{4, 4}, {24, 4}}: positions 4 to 7 and 24 to 27, in this order
#pragma once

#include <array>
#include <cstdint>
#include <numeric>

namespace phalanx {

struct PositionRange {
  std::int64_t first = 0, count = 0;
  bool operator==(const PositionRange&) const = default;
};

struct ContextCut {
  std::int64_t ranks = 1;
  std::int64_t rank = 0;
  std::int64_t multiple = 2;  // even; the positions of a rank are a multiple of it
  bool by_work = false;       // rows with documents are cut by packed_ranges(); all else is of rows of one document
  std::int64_t window = 0;    // which the work of all layers falls with; 0: none

  /// The length of the padded sequence.
  std::int64_t padded(std::int64_t seq_len) const noexcept {
    const std::int64_t unit = ranks * multiple;
    return (seq_len + unit - 1) / unit * unit;
  }
  /// The same, and `seq_len` itself if there is one rank, which cuts nothing.
  std::int64_t padded_if_cut(std::int64_t seq_len) const noexcept { return ranks > 1 ? padded(seq_len) : seq_len; }
  /// How many positions each rank has of a sequence of `seq_len` tokens, padding included.
  std::int64_t local(std::int64_t seq_len) const noexcept { return padded(seq_len) / ranks; }
  /// The numbers of a rank's two pieces: its head and its tail.
  std::array<std::int64_t, 2> pieces_of(std::int64_t of_rank) const noexcept {
    return {of_rank, 2 * ranks - 1 - of_rank};
  }
  /// This rank's positions, in the order in which it holds them.
  std::array<PositionRange, 2> ranges(std::int64_t seq_len) const noexcept { return ranges_of(rank, seq_len); }
  std::array<PositionRange, 2> ranges_of(std::int64_t of_rank, std::int64_t seq_len) const noexcept {
    const std::int64_t length = local(seq_len) / 2;
    const auto [head, tail] = pieces_of(of_rank);
    return {PositionRange{head * length, length}, PositionRange{tail * length, length}};
  }
};

/// Whether an exchange of heads can deal out so many of queries and of keys: several ranks may have the same keys.
constexpr bool deals_out_heads(std::int64_t heads, std::int64_t kv_heads, std::int64_t ranks) noexcept {
  return heads % ranks == 0 && (kv_heads % ranks == 0 || ranks % kv_heads == 0);
}

/// ContextCut::multiple for ranks that tensor parallelism divides further: with sequence parallelism each of its ranks
/// has as many positions.
constexpr std::int64_t positions_multiple(std::int64_t tensor_parallel_size, bool sequence_parallel) noexcept {
  return sequence_parallel ? std::lcm(std::int64_t{2}, tensor_parallel_size) : 2;
}

}  // namespace phalanx
