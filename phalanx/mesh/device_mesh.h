// DeviceMesh: named axes over the ranks, with one Communicator per axis, as in PyTorch's DeviceMesh.
//
// - Ranks are numbered row-major, the last axis innermost: with {{"dp", 2}, {"tp", 4}} ranks 0..3 are one tp group, and
//   so are 4..7. Put the axis with the most communication last: its ranks are neighbours.
// - An axis that spans the whole world uses the world communicator itself. The others are made by split() and named
//   after the axis ("tp").
// - A mesh is a handle: copies and sub-meshes share the communicators. Only the rank's thread may use it.
// - Wrong sizes and names are ConfigErrors; they are thrown before any communication.
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
  /// Throws ConfigError for wrong axes.
  /// REQUIRES: all ranks of `world` call it with the same axes (it is collective).
  DeviceMesh(std::shared_ptr<Communicator> world, std::vector<MeshAxis> axes, std::string device_type = "cpu");

  /// The communicator of the ranks that differ from this one only in this axis, in the order of their coordinates.
  const std::shared_ptr<Communicator>& communicator(const std::string& axis) const;
  int coordinate(const std::string& axis) const;
  int size(const std::string& axis) const;
  bool has(const std::string& axis) const noexcept;

  const std::vector<MeshAxis>& axes() const noexcept { return axes_; }
  int size() const noexcept;  // the number of ranks in this mesh or sub-mesh: the product of the axes
  int rank() const;           // this rank's row-major index in this mesh; in a sub-mesh not its rank in the world
  MeshShape shape() const;
  const std::shared_ptr<Communicator>& world() const noexcept;
  const std::string& device_type() const noexcept;

  /// The slice of the mesh that contains this rank, with only these axes, in the mesh's order. Not collective.
  DeviceMesh sub_mesh(const std::vector<std::string>& names) const;
  /// One communicator over several axes (row-major), named e.g. "dp_cp".
  /// REQUIRES: all ranks of the world call it (it is collective).
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
