// A tensor with its global name, the unit in which parameters, optimizer state and checkpoints are spoken of.
//
// The name is fully qualified and the same on every rank and in every layout ("layers.0.attention.wq.weight"); the
// tensor is a handle to live storage, never a copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace phalanx {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// Everything under `prefix` + name, in the same order; handles, not copies.
inline std::vector<NamedTensor> with_prefix(const std::string& prefix, const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> result;
  result.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) result.push_back({prefix + name, tensor});
  return result;
}

}  // namespace phalanx
