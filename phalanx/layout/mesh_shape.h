// MeshShape: the names and sizes of a mesh's axes, and the conversion between ranks and coordinates. It has no
// communicator.
//
// A description of a layout (tensor/shard_spec.h) needs only this of a mesh. So it can also be used without
// communication: by a checkpoint reader or a planner. DeviceMesh (device_mesh.h) adds the communicators.
//
// - Ranks are numbered row-major, the last axis innermost: on (dp=2, tp=4) rank 5 has the coordinates {1, 1}. A rank is
//   an index in this mesh, 0 to size() - 1; in a sub-mesh it is not the rank in the world.
// - A name consists of letters, digits, '_', '-' and '.', and is used once. A size is at least 1. Anything else, and
//   any unknown axis, is a ConfigError. A mesh without axes has one rank.
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
  int size() const noexcept;  // the number of ranks: the product of the axes
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
