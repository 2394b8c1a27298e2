// The shard of a tensor that only the ranks at one coordinate of an axis have: those of a pipeline's stage, or those
// with one of the experts. All rows are theirs, cut among them as before, and the other ranks have none.
//
//   // layers.3.wq.weight, cut by rows over tp among the ranks of stage 1
//   const ShardSpec spec = held_by_owner(held, mesh.shape(), "pp", /*owner=*/1);   // pp:S(0){0, 64}, tp:S(0)
#pragma once

#include <map>
#include <string>
#include <vector>

#include "phalanx/layout/mesh_shape.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

class Communicator;

/// `mesh`: all ranks, with the axis `axis`. If the tensor's own mesh has that axis, it is used instead.
/// REQUIRES: the tensor has dimensions, and `mesh` has all axes along which it is cut.
ShardSpec held_by_owner(const NamedTensor& held, const MeshShape& mesh, const std::string& axis, int owner);

/// The specs that all ranks of the group own, by name. Collective over the group.
/// REQUIRES: no two ranks own one name, unless their specs are equal.
std::map<std::string, ShardSpec> specs_of_group(Communicator& group, const std::vector<ShardSpec>& own);

}  // namespace phalanx
