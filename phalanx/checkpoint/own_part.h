// Copies what a rank holds of a tensor that is there as a whole.
#pragma once

#include <ATen/core/Tensor.h>

#include "phalanx/tensor/named.h"

namespace phalanx {

/// Converts to the type and device of `to`.
inline void copy_own_part(const NamedTensor& to, at::Tensor whole) {
  if (to.shard) {
    const Box box = to.shard->box();
    for (std::size_t dim = 0; dim < box.shape.size(); ++dim) {
      whole = whole.narrow(static_cast<std::int64_t>(dim), box.offsets[dim], box.shape[dim]);
    }
  }
  to.tensor.copy_(whole);
}

}  // namespace phalanx
