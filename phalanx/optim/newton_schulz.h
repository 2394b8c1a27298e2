// Orthogonalises a matrix by a Newton-Schulz iteration, as torch.optim.Muon does: U S V^T becomes about U V^T.
//
// The arithmetic is torch's: bfloat16 throughout, with products that are rounded to it after each operation.
// A tall matrix is turned first. The singular values of the result lie between about 0.7 and 1.2, by the
// choice of the coefficients. On one kind of device, equal matrices get equal bits. On the CPU these do not
// depend on the number of threads.
//
//   at::Tensor update = newton_schulz(momentum.to(at::kBFloat16), {});
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace phalanx {

struct NewtonSchulzOptions {
  std::int64_t steps = 5;
  std::array<double, 3> coefficients = {3.4445, -4.7750, 2.0315};
  double eps = 1e-7;  // the least norm by which the matrix is divided
};

/// REQUIRES: a matrix of bfloat16.
/// ENSURES: a new one of the same shape. The rows of a turned one are not contiguous.
at::Tensor newton_schulz(const at::Tensor& matrix, const NewtonSchulzOptions& options);

/// How much work it is, up to a factor.
double newton_schulz_cost(const std::vector<std::int64_t>& shape);

}  // namespace phalanx
