// narrow_to_box: the part of a tensor that a box names, as a view.
//
//   narrow_to_box(whole, shard->box()).copy_(tensor);   // what this rank holds goes where it belongs
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "phalanx/base/assert.h"
#include "phalanx/layout/box.h"

namespace phalanx {

/// A view that shares the memory of `whole`. Differentiable, as at::narrow is. The box may be empty.
/// REQUIRES: the box lies inside the tensor, and has as many dimensions.
inline at::Tensor narrow_to_box(const at::Tensor& whole, const Box& box) {
  PHALANX_ASSERT(static_cast<std::int64_t>(box.shape.size()) == whole.dim(),
                 "a box has as many dimensions as the tensor");
  at::Tensor part = whole;
  for (std::size_t dim = 0; dim < box.shape.size(); ++dim) {
    part = part.narrow(static_cast<std::int64_t>(dim), box.offsets[dim], box.shape[dim]);
  }
  return part;
}

}  // namespace phalanx
