#include "phalanx/lecture/tree.h"

#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

#include <algorithm>

namespace phalanx::lecture {
namespace {

/// In-order over [0, n): odd ranks are leaves.
Tree first_tree(int n) {
  Tree parents(static_cast<std::size_t>(n), -1);
  for (int rank = 1; rank < n; ++rank) {
    const int bit = rank & -rank;
    const int parent = (rank ^ bit) | (bit << 1);
    parents[static_cast<std::size_t>(rank)] = parent < n ? parent : rank ^ bit;
  }
  return parents;
}

}  // namespace

std::vector<Tree> two_trees(int ranks) {
  const Tree first = first_tree(ranks);
  Tree second(first.size(), -1);
  const auto other = [ranks](int rank) { return ranks % 2 == 0 ? ranks - 1 - rank : (rank + 1) % ranks; };
  for (int rank = 0; rank < ranks; ++rank) {
    const int parent = first[static_cast<std::size_t>(rank)];
    second[static_cast<std::size_t>(other(rank))] = parent < 0 ? -1 : other(parent);
  }
  return {first, second};
}

int depth_in(const Tree& tree, int rank) {
  int depth = 0;
  for (; tree[static_cast<std::size_t>(rank)] >= 0; ++depth) rank = tree[static_cast<std::size_t>(rank)];
  return depth;
}

int height_of(const Tree& tree) {
  int height = 0;
  for (int rank = 0; rank < static_cast<int>(tree.size()); ++rank) height = std::max(height, depth_in(tree, rank));
  return height;
}

int children_of(const Tree& tree, int rank) { return static_cast<int>(std::count(tree.begin(), tree.end(), rank)); }

std::vector<TreeEdge> edges_of_step(const Tree& tree, int step) {
  const int height = height_of(tree);
  const bool up = step <= height;
  const int depth = up ? height + 1 - step : step - height;  // of the edges' lower ends
  std::vector<TreeEdge> edges;
  for (int rank = 0; rank < static_cast<int>(tree.size()); ++rank) {
    const int parent = tree[static_cast<std::size_t>(rank)];
    if (parent < 0 || depth_in(tree, rank) != depth) continue;
    edges.push_back(up ? TreeEdge{rank, parent} : TreeEdge{parent, rank});
  }
  return edges;
}

void tree_all_reduce(Communicator& comm, const at::Tensor& x, const std::vector<Tree>& trees,
                     const std::function<void(const std::string&)>& after_step) {
  const int height = height_of(trees.front());
  const std::int64_t length = x.size(0) / static_cast<std::int64_t>(trees.size());
  for (int step = 1; step <= 2 * height; ++step) {
    const bool up = step <= height;
    for (std::size_t i = 0; i < trees.size(); ++i) {
      const at::Tensor part = x.narrow(0, static_cast<std::int64_t>(i) * length, length);
      for (const TreeEdge& edge : edges_of_step(trees[i], step)) {
        if (edge.from == comm.rank()) comm.send(part, edge.to);
        if (edge.to != comm.rank()) continue;
        const at::Tensor arrived = at::empty_like(part);
        comm.recv(arrived, edge.from);
        up ? part.add_(arrived) : part.copy_(arrived);
      }
    }
    after_step(fmt::format("step {}, {}", step, up ? "up" : "down"));
  }
}

}  // namespace phalanx::lecture
