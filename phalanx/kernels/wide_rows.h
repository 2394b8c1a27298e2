// Products with a frozen weight in fewer bits than the fp32 activations.
// Some rows of it are widened at a time, into one small buffer.
//
//   const NarrowMatrix w{rows, columns, weight.device(), [&](std::int64_t first, const at::Tensor& wide) {
//     wide.copy_(weight.narrow(0, first, wide.size(0)));
//   }};
//   at::Tensor y = product_by_rows(x, w);
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "phalanx/layout/wide_rows.h"

namespace phalanx::kernels {

struct NarrowMatrix {
  std::int64_t rows = 0, columns = 0;
  at::Device device = at::kCPU;
  /// Writes the rows from `first` on into `wide`, fp32 [some rows, columns].
  std::function<void(std::int64_t first, const at::Tensor& wide)> widen;
};

/// Calls use(first, wide) for all rows, some at a time, in their order.
void for_wide_rows(const NarrowMatrix& weight,
                   const std::function<void(std::int64_t first, const at::Tensor& wide)>& use);

/// Whether a product with x is to be one of those below: x is in fp32 on the host. Autograd cannot follow them.
inline bool widens_by_rows(const at::Tensor& x) { return x.device().is_cpu() && x.scalar_type() == at::kFloat; }

/// x W^T + b: x [..., columns], bias [rows] or undefined -> [..., rows].
/// REQUIRES: widens_by_rows(x).
at::Tensor product_by_rows(const at::Tensor& x, const NarrowMatrix& weight, const at::Tensor& bias = {});

/// dy W: dy [..., rows] -> [..., columns].
/// REQUIRES: widens_by_rows(dy).
at::Tensor input_gradient_by_rows(const at::Tensor& dy, const NarrowMatrix& weight);

}  // namespace phalanx::kernels
