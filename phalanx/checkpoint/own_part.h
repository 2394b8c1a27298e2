// Copies what a rank holds of a tensor that is there as a whole.
#pragma once

#include <ATen/core/Tensor.h>

#include "phalanx/tensor/named.h"
#include "phalanx/tensor/narrow_to_box.h"

namespace phalanx {

/// Converts to the type and device of `to`.
inline void copy_own_part(const NamedTensor& to, const at::Tensor& whole) {
  to.tensor.copy_(to.shard ? narrow_to_box(whole, to.shard->box()) : whole);
}

}  // namespace phalanx
