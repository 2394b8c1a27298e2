#include "phalanx/layout/mesh_shape.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"

namespace phalanx {
namespace {

// These characters keep the text forms of meshes and placements easy to parse.
bool is_axis_name(const std::string& name) {
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
           c == '.';
  });
}

}  // namespace

MeshShape::MeshShape(std::vector<MeshAxis> axes) : axes_(std::move(axes)) {
  std::int64_t product = 1;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    const auto& axis = axes_[i];
    if (axis.name.empty()) throw ConfigError(fmt::format("mesh {}: an axis has no name", text()));
    if (!is_axis_name(axis.name))
      throw ConfigError(fmt::format("mesh {}: the name '{}' of an axis may hold letters, digits, '_', '-' and '.' only",
                                    text(), axis.name));
    if (axis.size < 1)
      throw ConfigError(
          fmt::format("mesh {}: axis '{}' has size {}: expected at least 1", text(), axis.name, axis.size));
    for (std::size_t j = 0; j < i; ++j)
      if (axes_[j].name == axis.name)
        throw ConfigError(fmt::format("mesh {}: two axes are named '{}'", text(), axis.name));
    product *= axis.size;
    if (product > std::numeric_limits<int>::max())
      throw ConfigError(fmt::format("mesh {}: the product of the sizes is too large for a number of ranks", text()));
  }
}

int MeshShape::size() const noexcept {
  int product = 1;
  for (const auto& axis : axes_) product *= axis.size;
  return product;
}

bool MeshShape::has(const std::string& axis) const noexcept {
  return std::any_of(axes_.begin(), axes_.end(), [&](const MeshAxis& own) { return own.name == axis; });
}

std::size_t MeshShape::index_of(const std::string& axis) const {
  std::vector<std::string> known;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == axis) return i;
    known.push_back(axes_[i].name);
  }
  throw ConfigError(fmt::format("mesh {} has no axis '{}'{}", text(), axis, did_you_mean(axis, known)));
}

std::vector<int> MeshShape::coordinates_of(int rank) const {
  if (rank < 0 || rank >= size())
    throw ConfigError(fmt::format("mesh {} has no rank {}: it has {} ranks", text(), rank, size()));
  std::vector<int> coordinates(axes_.size());
  for (std::size_t i = axes_.size(); i-- > 0; rank /= axes_[i].size) coordinates[i] = rank % axes_[i].size;
  return coordinates;
}

int MeshShape::rank_of(const std::vector<int>& coordinates) const {
  bool fits = coordinates.size() == axes_.size();
  for (std::size_t i = 0; fits && i < axes_.size(); ++i) fits = coordinates[i] >= 0 && coordinates[i] < axes_[i].size;
  if (!fits) throw ConfigError(fmt::format("mesh {} has no coordinates ({})", text(), fmt::join(coordinates, ", ")));
  int rank = 0;
  for (std::size_t i = 0; i < axes_.size(); ++i) rank = rank * axes_[i].size + coordinates[i];
  return rank;
}

std::string MeshShape::text() const {
  std::string text;
  for (const auto& axis : axes_) text += fmt::format("{}{}={}", text.empty() ? "" : ", ", axis.name, axis.size);
  return "(" + text + ")";
}

}  // namespace phalanx
