// NodeLayout: the nodes of a group, and the ranks of each node. Torch-free. The same on all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/comm/types.h"

namespace phalanx {

class NodeLayout {
 public:
  /// node_of[r]: any number. Ranks with equal numbers share a node. The layout numbers the nodes anew, in the order of
  /// their first ranks.
  explicit NodeLayout(const std::vector<int>& node_of);

  int ranks() const { return static_cast<int>(node_of_.size()); }
  int nodes() const { return static_cast<int>(members_.size()); }
  int node_of(int rank) const { return node_of_[static_cast<std::size_t>(rank)]; }
  /// The rank's place among the ranks of its node.
  int local_rank_of(int rank) const { return local_ranks_[static_cast<std::size_t>(rank)]; }
  /// In the order of their ranks.
  const std::vector<int>& members(int node) const { return members_[static_cast<std::size_t>(node)]; }
  /// The number of ranks of the smallest node. So many ranks of each node have a rank with the same local rank on every
  /// other node.
  int lanes() const { return lanes_; }
  /// Whether every node has a contiguous range of ranks. Then a sum in rank order goes from node to node.
  bool is_contiguous() const { return is_contiguous_; }

  /// Whether a reduction from node to node moves fewer bytes over the busiest node's wire than the flat backend does.
  /// The flat backend makes an all-to-all of slices and, except for reduce_scatter, an all-gather.
  bool is_chain_better(Verb verb, DataType dtype) const;

 private:
  std::vector<int> node_of_, local_ranks_;
  std::vector<std::vector<int>> members_;
  int lanes_ = 0;
  bool is_contiguous_ = true;
};

}  // namespace phalanx
