#include "phalanx/optim/newton_schulz.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cmath>

#include "phalanx/optim/row_squares.h"

namespace phalanx {
namespace {

/// 0-dim, in bfloat16. On the CPU the sum does not depend on the number of threads.
at::Tensor norm_of(const at::Tensor& matrix) {
  if (!matrix.device().is_cpu()) return matrix.norm();
  RowSquares squares;
  squares.add_rows(matrix);
  return at::full({}, std::sqrt(squares.sum().value()), matrix.options());
}

}  // namespace

at::Tensor newton_schulz(const at::Tensor& matrix, const NewtonSchulzOptions& options) {
  const at::NoGradGuard no_grad;
  const auto [a, b, c] = options.coefficients;
  const bool is_tall = matrix.size(0) > matrix.size(1);
  const at::Tensor norm = norm_of(matrix.contiguous()).clamp_min(options.eps);
  at::Tensor x = (is_tall ? matrix.t() : matrix).div(norm);  // its largest singular value is 1 at most
  for (std::int64_t step = 0; step < options.steps; ++step) {
    const at::Tensor gram = x.mm(x.t());
    const at::Tensor polynomial = at::addmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    x = at::addmm(x, polynomial, x, /*beta=*/a);
  }
  return is_tall ? x.t() : x;
}

double newton_schulz_cost(const std::vector<std::int64_t>& shape) {
  const auto [least, most] = std::minmax(shape.at(0), shape.at(1));
  const auto m = static_cast<double>(least), n = static_cast<double>(most);
  return m * m * (2 * n + m);
}

}  // namespace phalanx
