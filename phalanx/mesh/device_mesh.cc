#include "phalanx/mesh/device_mesh.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"

namespace phalanx {

// The full mesh, which every sub-mesh refers to.
struct DeviceMesh::Shared {
  std::shared_ptr<Communicator> world;
  std::string device_type;
  std::vector<MeshAxis> axes;
  std::vector<int> coordinates;  // of this rank
  std::vector<std::shared_ptr<Communicator>> communicators;
};

namespace {

MeshShape checked(std::vector<MeshAxis> axes, int world_size) {
  if (axes.empty()) throw ConfigError("a device mesh needs at least one axis");
  MeshShape shape(std::move(axes));
  if (shape.size() != world_size)
    throw ConfigError(
        fmt::format("device mesh {} has {} ranks and the world {}: the sizes of the axes must multiply to "
                    "the number of ranks",
                    shape.text(), shape.size(), world_size));
  return shape;
}

// Row-major position along the chosen axes.
int position_along(const std::vector<MeshAxis>& axes, const std::vector<int>& coordinates,
                   const std::vector<bool>& chosen, bool wanted) {
  int position = 0;
  for (std::size_t i = 0; i < axes.size(); ++i)
    if (chosen[i] == wanted) position = position * axes[i].size + coordinates[i];
  return position;
}

}  // namespace

DeviceMesh::DeviceMesh(std::shared_ptr<Communicator> world, std::vector<MeshAxis> axes, std::string device_type)
    : axes_(axes) {
  auto shared = std::make_shared<Shared>();
  shared->coordinates = checked(axes, world->size()).coordinates_of(world->rank());
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].size == world->size()) {
      shared->communicators.push_back(world);
      continue;
    }
    std::vector<bool> chosen(axes.size(), false);
    chosen[i] = true;
    shared->communicators.push_back(
        world->split(position_along(axes, shared->coordinates, chosen, false), shared->coordinates[i], axes[i].name));
  }
  shared->world = std::move(world);
  shared->device_type = std::move(device_type);
  shared->axes = std::move(axes);
  shared_ = std::move(shared);
}

DeviceMesh::DeviceMesh(std::shared_ptr<const Shared> shared, std::vector<MeshAxis> axes)
    : shared_(std::move(shared)), axes_(std::move(axes)) {}

std::vector<std::size_t> DeviceMesh::positions_of(const std::vector<std::string>& names) const {
  std::vector<std::size_t> positions;
  for (const auto& name : names) {
    if (!has(name)) {
      std::vector<std::string> known;
      for (const auto& axis : axes_) known.push_back(axis.name);
      throw ConfigError(fmt::format("{} has no axis '{}'{}", text(), name, did_you_mean(name, known)));
    }
    for (std::size_t i = 0; i < shared_->axes.size(); ++i)
      if (shared_->axes[i].name == name) positions.push_back(i);
  }
  std::sort(positions.begin(), positions.end());
  if (std::adjacent_find(positions.begin(), positions.end()) != positions.end())
    throw ConfigError(fmt::format("{}: an axis is named twice", text()));
  return positions;
}

const std::shared_ptr<Communicator>& DeviceMesh::communicator(const std::string& axis) const {
  return shared_->communicators[positions_of({axis}).front()];
}

int DeviceMesh::coordinate(const std::string& axis) const { return shared_->coordinates[positions_of({axis}).front()]; }

int DeviceMesh::size(const std::string& axis) const { return shared_->axes[positions_of({axis}).front()].size; }

bool DeviceMesh::has(const std::string& axis) const noexcept {
  return std::any_of(axes_.begin(), axes_.end(), [&](const MeshAxis& own) { return own.name == axis; });
}

int DeviceMesh::size() const noexcept {
  int product = 1;
  for (const auto& axis : axes_) product *= axis.size;
  return product;
}

int DeviceMesh::rank() const {
  int rank = 0;
  for (const auto& axis : axes_) rank = rank * axis.size + coordinate(axis.name);
  return rank;
}

MeshShape DeviceMesh::shape() const { return MeshShape(axes_); }

const std::shared_ptr<Communicator>& DeviceMesh::world() const noexcept { return shared_->world; }
const std::string& DeviceMesh::device_type() const noexcept { return shared_->device_type; }

DeviceMesh DeviceMesh::sub_mesh(const std::vector<std::string>& names) const {
  if (names.empty()) throw ConfigError(fmt::format("{}: a sub-mesh needs at least one axis", text()));
  std::vector<MeshAxis> axes;
  for (const std::size_t i : positions_of(names)) axes.push_back(shared_->axes[i]);
  return {shared_, std::move(axes)};
}

std::shared_ptr<Communicator> DeviceMesh::flatten(const std::vector<std::string>& names) const {
  const auto positions = positions_of(names);
  if (positions.empty()) throw ConfigError(fmt::format("{}: flatten() needs at least one axis", text()));
  std::vector<bool> chosen(shared_->axes.size(), false);
  std::string name;
  for (const std::size_t i : positions) {
    chosen[i] = true;
    name += (name.empty() ? "" : "_") + shared_->axes[i].name;
  }
  return shared_->world->split(position_along(shared_->axes, shared_->coordinates, chosen, false),
                               position_along(shared_->axes, shared_->coordinates, chosen, true), name);
}

std::string DeviceMesh::text() const {
  return fmt::format("DeviceMesh({}, device: '{}')", shape().text(), shared_->device_type);
}

}  // namespace phalanx
