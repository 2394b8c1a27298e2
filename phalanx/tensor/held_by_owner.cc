#include "phalanx/tensor/held_by_owner.h"

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <utility>

#include "phalanx/comm/communicator.h"
#include "phalanx/comm/data_type.h"

namespace phalanx {
namespace {

std::size_t size_of(const MeshShape& mesh, const std::string& axis) {
  return static_cast<std::size_t>(mesh.axes()[mesh.index_of(axis)].size);
}

/// First cut over the axis: all rows belong to the ranks at `owner`. Then cut as those ranks cut them.
Placement placed(const Placement& held, const MeshShape& mesh, std::int64_t rows, const Split& of_owners,
                 std::size_t owner) {
  const std::size_t owners = of_owners.sizes.size();
  Placement placement{.splits = {of_owners}};
  placement.splits[0].sizes[owner] = rows;
  std::size_t blocks = 1;  // of rows, by the splits so far
  for (Split split : held.splits) {
    if (split.dim == 0) {
      const std::size_t parts = size_of(mesh, split.axis);
      if (!split.sizes.empty()) {
        // For each owner and each block; others have no rows.
        std::vector<std::int64_t> sizes(owners * blocks * parts);
        for (std::size_t i = 0; i < blocks * parts; ++i) {
          sizes[owner * blocks * parts + i] = split.sizes[i % split.sizes.size()];
        }
        split.sizes = std::move(sizes);
      }
      blocks *= parts;
    }
    placement.splits.push_back(std::move(split));
  }
  return placement;
}

}  // namespace

ShardSpec held_by_owner(const NamedTensor& held, const MeshShape& mesh, const std::string& axis, int owner) {
  const std::vector<std::int64_t> shape = held.global_shape();
  const bool has_axis = held.shard && held.shard->spec.mesh().has(axis);
  const MeshShape& whole = has_axis ? held.shard->spec.mesh() : mesh;
  const Split of_owners{.axis = axis, .dim = 0, .sizes = std::vector<std::int64_t>(size_of(whole, axis))};
  const Placement cut = held.shard ? held.shard->spec.placement() : Placement{};
  return {held.name, shape, data_type_of(held.tensor.scalar_type()), whole,
          placed(cut, whole, shape[0], of_owners, static_cast<std::size_t>(owner))};
}

std::map<std::string, ShardSpec> specs_of_group(Communicator& group, const std::vector<ShardSpec>& own) {
  std::string mine;  // one per line
  for (const ShardSpec& spec : own) mine += spec.text() + "\n";
  std::map<std::string, ShardSpec> specs;
  for (const std::string& text : group.all_gather_bytes(mine)) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const ShardSpec spec = ShardSpec::parse(line);
      specs.emplace(spec.name(), spec);
    }
  }
  return specs;
}

}  // namespace phalanx
