// NamedTensor: a tensor with its global name, the common form of parameters, optimizer state and checkpoint entries.
//
// The name is fully qualified and the same on every rank and in every layout ("layers.0.attention.wq.weight"). The
// tensor is a handle to live storage, never a copy. Without a shard it is the whole tensor, and all ranks that have it
// hold the same values. With a shard it is the part that this rank holds of the global tensor of that name. The part
// may be empty: every rank of the mesh lists it nevertheless.
//
//   NamedTensor p{"wq.weight", rows, std::make_shared<Shard>(spec, mesh.rank())};   // rows has p.shard->box().shape
//   p.global_shape();                                                               // {4096, 4096}
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/tensor/shard_spec.h"

namespace phalanx {

/// Which parts of a global tensor the ranks of a mesh hold, and which of these ranks this one is.
struct Shard {
  ShardSpec spec;
  int rank = 0;  // in the spec's mesh
  Box box() const { return spec.local_box(rank); }
  /// Whether this rank, of all ranks with these elements, is the one that writes, counts or sums them.
  bool is_first_holder() const { return spec.is_first_holder(rank); }
};

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  std::shared_ptr<const Shard> shard = nullptr;

  std::vector<std::int64_t> global_shape() const { return shard ? shard->spec.shape() : tensor.sizes().vec(); }
};

/// The same tensors (handles, not copies) under `prefix` + name, in the same order. A shard's spec keeps the name
/// without the prefix.
inline std::vector<NamedTensor> with_prefix(const std::string& prefix, const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> result;
  result.reserve(tensors.size());
  for (const auto& [name, tensor, shard] : tensors) result.push_back({prefix + name, tensor, shard});
  return result;
}

}  // namespace phalanx
