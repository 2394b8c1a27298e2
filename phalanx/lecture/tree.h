// An all-reduce along two binary trees, as NCCL's double binary tree: each tree carries one half of the array. Sums go
// up, then they come down.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"

namespace phalanx::lecture {

/// The parent of each rank; -1 of the root.
using Tree = std::vector<int>;

/// Every other rank is a leaf of the first tree. The second is its mirror image; for an odd number of ranks, the first
/// moved on by one rank. So with an even number no rank has children in both.
std::vector<Tree> two_trees(int ranks);

int depth_in(const Tree& tree, int rank);  // 0: the root
int height_of(const Tree& tree);           // the depth of the deepest rank
int children_of(const Tree& tree, int rank);

struct TreeEdge {
  int from = 0, to = 0;
};
/// What is sent in that step, from 1 to twice the height: up from the deepest ranks first, then down from the root.
std::vector<TreeEdge> edges_of_step(const Tree& tree, int step);

/// Sums x over the ranks in place. Calls `after_step` with a title after each step.
/// REQUIRES: the number of trees divides x.size(0), and they have one height.
void tree_all_reduce(Communicator& comm, const at::Tensor& x, const std::vector<Tree>& trees,
                     const std::function<void(const std::string&)>& after_step);

}  // namespace phalanx::lecture
