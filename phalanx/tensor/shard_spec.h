// ShardSpec: which rank of a mesh holds which elements of a global tensor. Torch-free; needs no communicator.
//
// Initialisation, sharding, tensor parallelism, optimizers, clipping and checkpoints all use this one description:
// global name, shape, dtype, the mesh's axes, and a Placement (placement.h). The box of every rank follows from it, so
// a reader of a file needs no running job to know which rank had which part.
//
// Contract
// - A value type: immutable and cheap to copy. Every rank constructs the same one by itself.
// - A rank holds exactly one box. Ranks are numbers, or coordinates, in the spec's mesh (mesh_shape.h). For a sub-mesh
//   these are not the ranks of the world: use DeviceMesh::rank().
// - The constructor checks everything and throws ConfigError: an unknown axis, an axis used twice, a dimension out of
//   range (a tensor without dimensions cannot be split), sizes that do not add up, a negative shape, a partial bool.
//
//   const ShardSpec spec("wq.weight", {10, 6}, DataType::f32, MeshShape({{"dp", 2}, {"tp", 2}}),
//                        {.splits = {{"tp", 0}, {"dp", 0}}});
//   spec.local_box(2);          // rank 2 is dp 1, tp 0: rows 3 and 4, [3:5, 0:6]
//   spec.text();                // 'wq.weight' float32[10, 6] on (dp=2, tp=2): tp:S(0), dp:S(0)
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/comm/types.h"
#include "phalanx/layout/box.h"
#include "phalanx/layout/mesh_shape.h"
#include "phalanx/tensor/placement.h"

namespace phalanx {

class ShardSpec {
 public:
  ShardSpec(std::string name, std::vector<std::int64_t> shape, DataType dtype, MeshShape mesh,
            Placement placement = {});

  const std::string& name() const noexcept { return name_; }
  const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  DataType dtype() const noexcept { return dtype_; }
  const MeshShape& mesh() const noexcept { return mesh_; }
  const Placement& placement() const noexcept { return placement_; }
  std::int64_t numel() const noexcept { return global_box().numel(); }
  Box global_box() const;
  /// The same tensor on the same mesh with another placement.
  ShardSpec with(Placement placement) const;

  Box local_box(int rank) const;
  Box local_box(const std::vector<int>& coordinates) const;
  /// Ranks whose box contains the whole `box`, and ranks whose box shares an element with it, ascending. An element is
  /// a box with all sizes 1. No rank holds an empty box. Along a partial axis every rank counts: each has an addend of
  /// the box.
  std::vector<int> ranks_holding(const Box& box) const;
  std::vector<int> ranks_touching(const Box& box) const;
  /// Whether this is the first of the ranks that hold the same elements. The boxes of the first holders together cover
  /// the tensor, each element once. So the first holders write, count or sum the elements. (Of a partial tensor: they
  /// hold the first addend.)
  bool is_first_holder(int rank) const;

  /// One cut of a dimension: part i of the dimension is [starts[i], starts[i + 1]). The coordinates along the axes that
  /// cut the dimension, outer first, number the parts row-major. Axes of one rank are left out: they cut nothing.
  struct Cut {
    std::size_t axis = 0;
    std::size_t split = 0;  // index into placement().splits
    std::vector<std::int64_t> starts;
  };
  const std::vector<Cut>& cuts(std::size_t dim) const { return cuts_[dim]; }
  bool is_partial(std::size_t axis) const noexcept;

  /// Whether every rank holds the same box under both specs and the same axes are partial: nothing has to move.
  bool same_layout(const ShardSpec& other) const;
  std::string text() const;
  /// Parses text()'s output. Throws a ConfigError that shows the position of the fault, or what the constructor throws.
  static ShardSpec parse(std::string_view text);
  bool operator==(const ShardSpec& other) const;

 private:
  std::string described() const;  // for messages
  void check_tensor() const;
  void check_axes() const;
  void cut(std::size_t split_number);
  std::vector<int> ranks_where(const Box& box, bool whole) const;

  std::string name_;
  std::vector<std::int64_t> shape_;
  DataType dtype_;
  MeshShape mesh_;
  Placement placement_;
  std::vector<std::vector<Cut>> cuts_;  // by dimension
};

}  // namespace phalanx
