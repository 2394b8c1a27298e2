// Where the ranks of a group are: its nodes, and the ranks of each. Torch-free; the same on all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/comm/types.h"

namespace phalanx {

class NodeLayout {
 public:
  /// node_of[r]: any numbers; equal ones are one node. Nodes are numbered anew, in the order of their first
  /// ranks.
  explicit NodeLayout(const std::vector<int>& node_of);

  int ranks() const { return static_cast<int>(node_of_.size()); }
  int nodes() const { return static_cast<int>(members_.size()); }
  int node_of(int rank) const { return node_of_[static_cast<std::size_t>(rank)]; }
  /// Its place among the ranks of its node.
  int local_rank_of(int rank) const { return local_ranks_[static_cast<std::size_t>(rank)]; }
  /// In the order of their ranks.
  const std::vector<int>& members(int node) const { return members_[static_cast<std::size_t>(node)]; }
  /// How many ranks of every node have one of the same place on all others.
  int lanes() const { return lanes_; }
  /// Whether every node has a contiguous range of ranks: then a sum can be taken node by node in rank order.
  bool is_contiguous() const { return is_contiguous_; }

  /// Whether a reduction moves fewer bytes over the busiest node's wire if it goes from node to node than if
  /// the flat backend does it (as gloo's does: all-to-all of slices, then for all but reduce_scatter an all-gather).
  bool is_chain_better(Verb verb, DataType dtype) const;

 private:
  std::vector<int> node_of_, local_ranks_;
  std::vector<std::vector<int>> members_;
  int lanes_ = 0;
  bool is_contiguous_ = true;
};

}  // namespace phalanx
