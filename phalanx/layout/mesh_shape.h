// MeshShape: the names and sizes of a mesh's axes, and the arithmetic of ranks and coordinates. Knows no communicator.
//
// It is what a description of a layout needs of a mesh (tensor/shard_spec.h), so that it can also be used where nobody
// communicates: by a checkpoint's reader, by a planner. DeviceMesh (device_mesh.h) adds the communicators.
//
// Contract
// - Ranks are numbered row-major, the innermost axis last: on (dp=2, tp=4) rank 5 has the coordinates {1, 1}. A rank is
//   a position in this mesh, 0 to size() - 1; in a sub-mesh that is not the rank in the world.
// - A name consists of letters, digits, '_', '-' and '.', and is used once; a size is at least 1. Anything else, and
//   any unknown axis, is a ConfigError. No axes at all: one rank.
//
//   const MeshShape mesh({{"dp", 2}, {"tp", 4}});
//   mesh.coordinates_of(5);     // {1, 1}
//   mesh.index_of("tp");        // 1
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace phalanx {

struct MeshAxis {
  std::string name;
  int size = 1;
  bool operator==(const MeshAxis&) const = default;
};

class MeshShape {
 public:
  MeshShape() = default;
  explicit MeshShape(std::vector<MeshAxis> axes);

  const std::vector<MeshAxis>& axes() const noexcept { return axes_; }
  int size() const noexcept;  // ranks: the product of the axes
  bool has(const std::string& axis) const noexcept;
  std::size_t index_of(const std::string& axis) const;

  std::vector<int> coordinates_of(int rank) const;
  int rank_of(const std::vector<int>& coordinates) const;

  std::string text() const;  // (dp=2, tp=4)
  bool operator==(const MeshShape&) const = default;

 private:
  std::vector<MeshAxis> axes_;
};

}  // namespace phalanx
