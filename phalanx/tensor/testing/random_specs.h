// Random shapes, meshes and placements, and a simple model of what a placement means (tests only).
//
// The model deals out lists of indices and shares no code with ShardSpec. Everything is a function of the seed, so all
// ranks of a test make the same cases.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/layout/mesh_shape.h"
#include "phalanx/tensor/placement.h"

namespace phalanx {

/// For each dimension, the indices that the rank holds.
inline std::vector<std::vector<std::int64_t>> held_indices(const std::vector<std::int64_t>& shape,
                                                           const MeshShape& mesh, const Placement& placement,
                                                           int rank) {
  std::vector<int> coordinates;
  int ranks = mesh.size();
  for (const auto& axis : mesh.axes()) {
    ranks /= axis.size;
    coordinates.push_back(rank / ranks);
    rank %= ranks;
  }
  std::vector<std::vector<std::int64_t>> held(shape.size());
  std::vector<std::size_t> block(shape.size(), 0);  // which of the blocks made so far
  for (std::size_t d = 0; d < shape.size(); ++d) {
    held[d].resize(static_cast<std::size_t>(shape[d]));
    std::iota(held[d].begin(), held[d].end(), 0);
  }
  for (const auto& split : placement.splits) {
    const auto d = static_cast<std::size_t>(split.dim);
    std::size_t axis = 0;
    while (mesh.axes()[axis].name != split.axis) ++axis;
    const auto parts = static_cast<std::size_t>(mesh.axes()[axis].size);
    std::vector<std::size_t> sizes(parts, 0);
    if (split.sizes.empty()) {
      for (std::size_t i = 0; i < held[d].size(); ++i) ++sizes[i % parts];  // dealt out in turn
    } else {
      const std::size_t first = split.sizes.size() == parts ? 0 : block[d] * parts;
      for (std::size_t i = 0; i < parts; ++i) sizes[i] = static_cast<std::size_t>(split.sizes[first + i]);
    }
    const auto mine = static_cast<std::size_t>(coordinates[axis]);
    std::size_t begin = 0;
    for (std::size_t i = 0; i < mine; ++i) begin += sizes[i];
    held[d] = {held[d].begin() + static_cast<std::ptrdiff_t>(begin),
               held[d].begin() + static_cast<std::ptrdiff_t>(begin + sizes[mine])};
    block[d] = block[d] * parts + mine;
  }
  return held;
}

class RandomSpecs {
 public:
  explicit RandomSpecs(std::uint64_t seed) : generator_(seed) {}

  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(generator_() % static_cast<std::uint64_t>(n)); }

  /// 1 to 3 axes, at most `max_ranks` ranks.
  MeshShape mesh(int max_ranks) {
    static const std::vector<std::string> names = {"pp", "dp", "tp"};
    std::vector<MeshAxis> axes;
    const std::int64_t count = 1 + below(3);
    int left = max_ranks;
    for (std::int64_t i = 0; i < count; ++i) {
      const int size = static_cast<int>(1 + below(left));
      axes.push_back({names[static_cast<std::size_t>(i)], size});
      left /= size;
    }
    return MeshShape(std::move(axes));
  }

  /// 0 to 4 dimensions of 0 to 9 elements; one in ten holds none at all.
  std::vector<std::int64_t> shape() {
    std::vector<std::int64_t> shape(static_cast<std::size_t>(below(5)));
    for (auto& size : shape) size = 1 + below(9);
    if (!shape.empty() && below(10) == 0)
      shape[static_cast<std::size_t>(below(static_cast<std::int64_t>(shape.size())))] = 0;
    return shape;
  }

  /// Any placement: axes in any order, each splitting evenly or not, partial, or replicating.
  Placement placement(const std::vector<std::int64_t>& shape, const MeshShape& mesh) {
    std::vector<std::size_t> order(mesh.axes().size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = order.size(); i-- > 1;)
      std::swap(order[i], order[static_cast<std::size_t>(below(static_cast<std::int64_t>(i + 1)))]);
    Placement placement;
    std::vector<std::vector<std::int64_t>> blocks;  // by dimension: lengths of the blocks so far
    for (const auto size : shape) blocks.push_back({size});
    for (const std::size_t i : order) {
      const auto& axis = mesh.axes()[i];
      const std::int64_t kind = below(6);
      if (kind == 0) placement.partial.push_back(axis.name);
      if (kind <= 1 || shape.empty()) continue;
      Split split{
          axis.name,
          static_cast<int>(below(std::min<std::int64_t>(static_cast<std::int64_t>(shape.size()), 2 + below(3)))),
          {}};
      auto& lengths = blocks[static_cast<std::size_t>(split.dim)];
      const bool equal = std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) == lengths.end();
      const bool even = below(3) > 0, once = equal && below(2) == 0;
      std::vector<std::int64_t> parts, sizes;
      for (std::size_t block = 0; block < lengths.size(); ++block) {
        if (block == 0 || !once || even)
          sizes = even ? dealt(lengths[block], axis.size) : cut(lengths[block], axis.size);
        parts.insert(parts.end(), sizes.begin(), sizes.end());
      }
      if (!even) split.sizes = once ? sizes : parts;
      lengths = parts;
      placement.splits.push_back(std::move(split));
    }
    return placement;
  }

 private:
  static std::vector<std::int64_t> dealt(std::int64_t length, int parts) {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(parts), 0);
    for (std::int64_t i = 0; i < length; ++i) ++sizes[static_cast<std::size_t>(i % parts)];
    return sizes;
  }

  std::vector<std::int64_t> cut(std::int64_t length, int parts) {
    std::vector<std::int64_t> ends(static_cast<std::size_t>(parts), length);
    for (std::size_t i = 0; i + 1 < ends.size(); ++i) ends[i] = below(length + 1);
    std::sort(ends.begin(), ends.end());
    std::vector<std::int64_t> sizes = ends;
    for (std::size_t i = 1; i < ends.size(); ++i) sizes[i] = ends[i] - ends[i - 1];
    return sizes;
  }

  std::mt19937_64 generator_;
};

}  // namespace phalanx
