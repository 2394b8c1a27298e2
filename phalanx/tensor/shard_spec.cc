#include "phalanx/tensor/shard_spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "phalanx/base/error.h"

namespace phalanx {

ShardSpec::ShardSpec(std::string name, std::vector<std::int64_t> shape, DataType dtype, MeshShape mesh,
                     Placement placement)
    : name_(std::move(name)),
      shape_(std::move(shape)),
      dtype_(dtype),
      mesh_(std::move(mesh)),
      placement_(std::move(placement)),
      cuts_(shape_.size()) {
  check_tensor();
  check_axes();
  for (std::size_t i = 0; i < placement_.splits.size(); ++i) cut(i);
}

std::string ShardSpec::described() const { return "shard spec " + text(); }

void ShardSpec::check_tensor() const {
  std::int64_t limit = std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(element_size(dtype_));
  for (const auto size : shape_) {
    if (size < 0) throw ConfigError(fmt::format("{}: a dimension has size {}: expected 0 or more", described(), size));
    if (size > 0) limit /= size;
  }
  if (limit == 0) throw ConfigError(fmt::format("{}: the tensor's bytes do not fit into 63 bits", described()));
}

void ShardSpec::check_axes() const {
  std::vector<bool> used(mesh_.axes().size(), false);
  const auto use = [&](const std::string& axis) {
    std::size_t index = 0;
    try {
      index = mesh_.index_of(axis);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("{}: {}", described(), error.what()));
    }
    if (used[index])
      throw ConfigError(fmt::format(
          "{}: axis '{}' is used twice: an axis splits one dimension, is partial, or replicates", described(), axis));
    used[index] = true;
  };
  for (const auto& split : placement_.splits) {
    use(split.axis);
    if (shape_.empty())
      throw ConfigError(
          fmt::format("{}: a tensor without dimensions cannot be split; replicate it, or give it the "
                      "shape [1]",
                      described()));
    if (split.dim < 0 || static_cast<std::size_t>(split.dim) >= shape_.size())
      throw ConfigError(fmt::format("{}: {} splits dimension {}: the tensor has the dimensions 0 to {}", described(),
                                    split.text(), split.dim, shape_.size() - 1));
  }
  for (const auto& axis : placement_.partial) use(axis);
  if (!placement_.partial.empty() && dtype_ == DataType::boolean)
    throw ConfigError(fmt::format("{}: partial values are summed, which bool has no sum for", described()));
}

void ShardSpec::cut(std::size_t split_number) {
  const Split& split = placement_.splits[split_number];
  const auto dim = static_cast<std::size_t>(split.dim);
  const std::size_t axis = mesh_.index_of(split.axis);
  const auto parts = static_cast<std::size_t>(mesh_.axes()[axis].size);
  const std::vector<std::int64_t> outer =
      cuts_[dim].empty() ? std::vector<std::int64_t>{0, shape_[dim]} : cuts_[dim].back().starts;
  const std::size_t blocks = outer.size() - 1;

  const auto& sizes = split.sizes;
  if (!sizes.empty() && sizes.size() != parts && sizes.size() != parts * blocks)
    throw ConfigError(
        fmt::format("{}: {} has {} sizes: expected {}", described(), split.text(), sizes.size(),
                    blocks == 1 ? fmt::format("{}, one for each rank along '{}'", parts, split.axis)
                                : fmt::format("{}, one for each rank along '{}', or {} for the {} blocks that the "
                                              "earlier splits make of dimension {}",
                                              parts, split.axis, parts * blocks, blocks, split.dim)));

  std::vector<std::int64_t> starts;
  starts.reserve(parts * blocks + 1);
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::int64_t length = outer[block + 1] - outer[block];
    const std::size_t first = sizes.size() == parts ? 0 : block * parts;
    std::int64_t sum = 0;
    for (std::size_t part = 0; part < parts; ++part) {
      starts.push_back(outer[block] + (sizes.empty() ? even_begin(length, static_cast<std::int64_t>(parts),
                                                                  static_cast<std::int64_t>(part))
                                                     : sum));
      if (sizes.empty()) continue;
      const std::int64_t size = sizes[first + part];
      if (size < 0) throw ConfigError(fmt::format("{}: {} has the size {}", described(), split.text(), size));
      // A size that is too large is reported like any other wrong sum. The comparison cannot overflow.
      sum = size > length - sum ? length + 1 : sum + size;
      if (sum > length) break;
    }
    if (!sizes.empty() && sum != length)
      throw ConfigError(fmt::format("{}: the sizes of {} {} than the {} elements {} to {} of dimension {}", described(),
                                    split.text(), sum > length ? "add up to more" : "add up to less", length,
                                    outer[block], outer[block + 1], split.dim));
  }
  starts.push_back(shape_[dim]);
  if (parts > 1) cuts_[dim].push_back({axis, split_number, std::move(starts)});
}

Box ShardSpec::global_box() const { return {std::vector<std::int64_t>(shape_.size(), 0), shape_}; }

ShardSpec ShardSpec::with(Placement placement) const { return {name_, shape_, dtype_, mesh_, std::move(placement)}; }

Box ShardSpec::local_box(int rank) const { return local_box(mesh_.coordinates_of(rank)); }

Box ShardSpec::local_box(const std::vector<int>& coordinates) const {
  (void)mesh_.rank_of(coordinates);  // throws if there is no such rank
  Box box = global_box();
  for (std::size_t d = 0; d < shape_.size(); ++d) {
    if (cuts_[d].empty()) continue;
    std::size_t part = 0;
    for (const auto& cut : cuts_[d])
      part = part * static_cast<std::size_t>(mesh_.axes()[cut.axis].size) +
             static_cast<std::size_t>(coordinates[cut.axis]);
    const auto& starts = cuts_[d].back().starts;
    box.offsets[d] = starts[part];
    box.shape[d] = starts[part + 1] - starts[part];
  }
  return box;
}

std::vector<int> ShardSpec::ranks_where(const Box& box, bool whole) const {
  if (box.shape.size() != shape_.size() || (!box.empty() && !global_box().contains(box)))
    throw ConfigError(fmt::format("{}: box {} does not lie in the tensor", described(), box.text()));
  std::vector<int> ranks;
  for (int rank = 0; rank < mesh_.size(); ++rank) {
    const Box local = local_box(rank);
    if (whole ? local.contains(box) : intersect(local, box).has_value()) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> ShardSpec::ranks_holding(const Box& box) const { return ranks_where(box, true); }
std::vector<int> ShardSpec::ranks_touching(const Box& box) const { return ranks_where(box, false); }

bool ShardSpec::is_first_holder(int rank) const {
  std::vector<int> coordinates = mesh_.coordinates_of(rank);
  for (const auto& cuts : cuts_)
    for (const auto& cut : cuts) coordinates[cut.axis] = 0;
  return std::all_of(coordinates.begin(), coordinates.end(), [](int coordinate) { return coordinate == 0; });
}

bool ShardSpec::is_partial(std::size_t axis) const noexcept {
  return std::find(placement_.partial.begin(), placement_.partial.end(), mesh_.axes()[axis].name) !=
         placement_.partial.end();
}

bool ShardSpec::same_layout(const ShardSpec& other) const {
  if (shape_ != other.shape_ || mesh_ != other.mesh_) return false;
  for (std::size_t axis = 0; axis < mesh_.axes().size(); ++axis)
    if (mesh_.axes()[axis].size > 1 && is_partial(axis) != other.is_partial(axis)) return false;
  for (int rank = 0; rank < mesh_.size(); ++rank)
    if (local_box(rank) != other.local_box(rank)) return false;
  return true;
}

bool ShardSpec::operator==(const ShardSpec& other) const {
  return name_ == other.name_ && shape_ == other.shape_ && dtype_ == other.dtype_ && mesh_ == other.mesh_ &&
         placement_ == other.placement_;
}

}  // namespace phalanx
