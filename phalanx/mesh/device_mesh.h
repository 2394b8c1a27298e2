// DeviceMesh: named axes over the ranks, one Communicator per axis.
//
// Contract
// - Ranks are numbered row-major, the innermost axis last: with {{"dp", 2}, {"tp", 4}} ranks 0..3 are one tp group, and
//   so are 4..7. Put the axis that talks most last: its ranks are neighbours.
// - Constructor and flatten() are collective over the world communicator. An axis that spans the whole world uses the
//   world communicator itself; the others are made by split() and named after the axis ("tp").
// - A mesh is a handle: copies and sub-meshes share the communicators. Used by one thread at a time, its rank's.
// - Wrong sizes and names are ConfigErrors, thrown before anything is communicated.
//
//   DeviceMesh mesh(world, {{"dp", 2}, {"tp", 2}});
//   mesh.communicator("tp")->all_reduce(x);
//   const int shard = mesh.coordinate("tp"), shards = mesh.size("tp");
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/layout/mesh_shape.h"

namespace phalanx {

class DeviceMesh {
 public:
  DeviceMesh(std::shared_ptr<Communicator> world, std::vector<MeshAxis> axes, std::string device_type = "cpu");

  /// The ranks that differ from this one in the axis only, in the order of their coordinates.
  const std::shared_ptr<Communicator>& communicator(const std::string& axis) const;
  int coordinate(const std::string& axis) const;
  int size(const std::string& axis) const;
  bool has(const std::string& axis) const noexcept;

  const std::vector<MeshAxis>& axes() const noexcept { return axes_; }
  int size() const noexcept;  // the product of the axes: of the ranks that this mesh, or sub-mesh, spans
  int rank() const;           // this rank's place among them, row-major; of a sub-mesh: not its rank in the world
  MeshShape shape() const;
  const std::shared_ptr<Communicator>& world() const noexcept;
  const std::string& device_type() const noexcept;

  /// Some of the axes, in the mesh's order: the slice of the mesh that this rank lies in. Not collective.
  DeviceMesh sub_mesh(const std::vector<std::string>& names) const;
  /// One communicator over several axes at once (row-major), named "dp_cp". Collective over the world.
  std::shared_ptr<Communicator> flatten(const std::vector<std::string>& names) const;

  std::string text() const;  // DeviceMesh((dp=2, tp=2), device: 'cpu')

 private:
  struct Shared;
  DeviceMesh(std::shared_ptr<const Shared> shared, std::vector<MeshAxis> axes);
  std::vector<std::size_t> positions_of(const std::vector<std::string>& names) const;

  std::shared_ptr<const Shared> shared_;
  std::vector<MeshAxis> axes_;
};

}  // namespace phalanx
