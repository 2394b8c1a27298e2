// ReductionChunks: what the two kinds of reductions over nodes have in common.
//
// The data go in chunks, and a chunk in one piece for each lane. Chunks of a reduce_scatter are for each node in turn.
// A lane is the ranks with one local rank, one of each node; the smallest node has a rank for every lane. On its node,
// the rank of a lane gathers what there is of its piece, deals with the other nodes, and gets the result. Then the
// results go to the ranks of the node that want them.
#pragma once

#include <vector>

#include "phalanx/comm/hierarchical/collective_schedule.h"
#include "phalanx/comm/slices.h"

namespace phalanx {

class ReductionChunks {
 public:
  using Id = CollectiveSchedule::Id;

  struct Chunk {
    std::size_t begin = 0, count = 0;  // elements
    int owner_node = -1;               // the node that wants the result; -1: all
  };

  /// piece_bytes: the most of a piece, in the accumulator's type.
  ReductionChunks(HierarchicalBackend& backend, const OperationDescription& description, std::size_t piece_bytes);

  const std::vector<Chunk>& all() const { return chunks_; }
  const std::byte* source(std::size_t element) const;
  std::byte* output(std::size_t element) const { return static_cast<std::byte*>(d_.output) + element * width_; }
  /// A lane's piece, in elements of the chunk.
  Range piece(const Chunk& chunk, int lane) const { return slice_of(chunk.count, lanes_, lane); }
  /// This rank's piece; empty if it is in no lane.
  Range own_piece(const Chunk& chunk) const { return is_lane() ? piece(chunk, local_rank_) : Range{}; }
  std::size_t longest_piece() const;
  bool is_lane() const { return local_rank_ < lanes_; }
  bool is_wanted(const Chunk& chunk) const { return chunk.owner_node < 0 || chunk.owner_node == node_; }
  /// The rank of this rank's lane on another node.
  int rank_at(int node) const { return layout_.members(node)[static_cast<std::size_t>(local_rank_)]; }
  /// Where in the output this rank's share of the chunk begins.
  std::byte* output_of(const Chunk& chunk) const;
  /// Whether every rank of the node has just the piece that it wants.
  bool is_dealt(const Chunk& chunk) const;
  /// The collective of the node that brings the results of a chunk from the lanes to the ranks that want them.
  /// `result`: this rank's piece; for all_reduce it is in the output already.
  /// REQUIRES: is_dealt() is false.
  OperationDescription deal(const Chunk& chunk, const std::byte* result) const;

 private:
  // Elements of reduce_scatter's input that are for one rank.
  Range slice_for(int rank) const { return part_of(d_.counts, d_.output_count, rank); }
  std::int64_t share(const Chunk& chunk, int lane, int local_rank) const;

  const NodeLayout& layout_;
  const OperationDescription& d_;
  const std::size_t width_;
  const int rank_, node_, local_rank_, local_size_, lanes_;
  std::vector<Chunk> chunks_;
};

/// The type in which sums are taken: float32 for 16-bit floats, else the type itself.
DataType accumulator_of(DataType dtype);
/// acc = (is_first ? nothing : acc) op inputs[0] op inputs[1] ... `acc` has the accumulator's type.
void accumulate(DataType dtype, ReduceOp op, void* acc, bool is_first, const std::vector<const std::byte*>& inputs,
                std::size_t count);
/// acc = weights[0] * inputs[0] + weights[1] * inputs[1] + ..., of floating-point numbers.
void add_weighted(DataType dtype, void* acc, const std::vector<const std::byte*>& inputs,
                  const std::vector<int>& weights, std::size_t count);
/// The result, from the accumulator's type to the elements' type. avg: divides by `divisor`. `acc` is changed.
void finish_sum(DataType dtype, ReduceOp op, void* result, void* acc, std::size_t count, int divisor);

}  // namespace phalanx
