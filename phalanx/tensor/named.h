// A tensor with its global name, the unit in which parameters, optimizer state and checkpoints are spoken of.
//
// The name is fully qualified and the same on every rank and in every layout ("layers.0.attention.wq.weight"); the
// tensor is a handle to live storage, never a copy. Without a shard it is the whole tensor, and every rank that has it
// holds the same values. With one, it is what a rank holds of a global tensor of that name, which may be nothing: every
// rank of the mesh lists it all the same.
//
//   NamedTensor p{"wq.weight", rows, std::make_shared<Shard>(spec, mesh.rank())};   // rows.sizes() == p.shard->box()
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
  /// Whether of all ranks with these elements this is the one that writes, counts or sums them.
  bool is_first_holder() const { return spec.is_first_holder(rank); }
};

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  std::shared_ptr<const Shard> shard = nullptr;

  std::vector<std::int64_t> global_shape() const { return shard ? shard->spec.shape() : tensor.sizes().vec(); }
};

/// Everything under `prefix` + name, in the same order; handles, not copies. A shard's spec keeps the bare name.
inline std::vector<NamedTensor> with_prefix(const std::string& prefix, const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> result;
  result.reserve(tensors.size());
  for (const auto& [name, tensor, shard] : tensors) result.push_back({prefix + name, tensor, shard});
  return result;
}

}  // namespace phalanx
