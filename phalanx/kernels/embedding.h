// Embedding lookup on any device and dtype: at::embedding().
//
// On the CPU, the backward pass sums the table's gradient directly into a buffer that is offered for it
// (tensor/weight_gradient.h), for example a data-parallel bucket. The bits are those of autograd's own way: the
// contributions to a row are summed in the order of the ids, then written, or added in a later pass of an accumulation.
// Other devices use autograd's own way.
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx::kernels {

/// weight [count, dim], ids int64 or int32 [...] -> [..., dim]. An id out of range is torch's IndexError.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& ids);

}  // namespace phalanx::kernels
