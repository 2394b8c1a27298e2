#include "phalanx/comm/hierarchical/node_layout.h"

#include <algorithm>
#include <map>

namespace phalanx {

NodeLayout::NodeLayout(const std::vector<int>& node_of) {
  std::map<int, int> numbers;
  for (int rank = 0; rank < static_cast<int>(node_of.size()); ++rank) {
    const int node =
        numbers.emplace(node_of[static_cast<std::size_t>(rank)], static_cast<int>(numbers.size())).first->second;
    if (node == nodes()) members_.emplace_back();
    std::vector<int>& members = members_[static_cast<std::size_t>(node)];
    if (!members.empty() && members.back() != rank - 1) is_contiguous_ = false;
    node_of_.push_back(node);
    local_ranks_.push_back(static_cast<int>(members.size()));
    members.push_back(rank);
  }
  lanes_ = ranks();
  for (const auto& members : members_) lanes_ = std::min(lanes_, static_cast<int>(members.size()));
}

bool NodeLayout::is_chain_better(Verb verb, DataType dtype) const {
  // Bytes for each element that leave the busiest node.
  const double width = static_cast<double>(element_size(dtype));
  const double prefix = std::max(width, dtype == DataType::f16 || dtype == DataType::bf16 ? 4.0 : 1.0);
  double largest = 0;
  for (const auto& members : members_) largest = std::max(largest, static_cast<double>(members.size()));
  const double all = ranks();
  double flat = largest * (all - largest) / all * width;  // the all-to-all
  double chain = prefix;                                  // up; results come down on the other side of the wire
  if (verb != Verb::reduce_scatter) {
    flat += (all - 1) / all * width;
    if (nodes() > 2) chain += width;  // a node in the middle passes both on
  }
  return chain < flat;
}

}  // namespace phalanx
