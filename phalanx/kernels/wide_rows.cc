#include "phalanx/kernels/wide_rows.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

namespace phalanx::kernels {
namespace {

at::Tensor like_with_last(const at::Tensor& x, std::int64_t last) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape.back() = last;
  return at::empty(shape, x.options());
}

}  // namespace

void for_wide_rows(const NarrowMatrix& weight,
                   const std::function<void(std::int64_t first, const at::Tensor& wide)>& use) {
  const std::int64_t at_once = wide_rows_at_once(weight.rows, weight.columns);
  const at::Tensor buffer = at::empty({at_once, weight.columns}, at::TensorOptions(at::kFloat).device(weight.device));
  for (std::int64_t first = 0; first < weight.rows; first += at_once) {
    const at::Tensor wide = buffer.narrow(0, 0, std::min(at_once, weight.rows - first));
    weight.widen(first, wide);
    use(first, wide);
  }
}

at::Tensor product_by_rows(const at::Tensor& x, const NarrowMatrix& weight, const at::Tensor& bias) {
  const at::Tensor rows_of_x = x.reshape({-1, weight.columns});
  at::Tensor y = like_with_last(x, weight.rows);
  const at::Tensor rows_of_y = y.view({-1, weight.rows});
  if (bias.defined()) rows_of_y.copy_(bias);
  for_wide_rows(weight, [&](std::int64_t first, const at::Tensor& wide) {
    rows_of_y.narrow(1, first, wide.size(0)).addmm_(rows_of_x, wide.t(), bias.defined() ? 1.0 : 0.0);
  });
  return y;
}

at::Tensor input_gradient_by_rows(const at::Tensor& dy, const NarrowMatrix& weight) {
  const at::Tensor rows_of_dy = dy.reshape({-1, weight.rows});
  at::Tensor dx = like_with_last(dy, weight.columns);
  const at::Tensor rows_of_dx = dx.view({-1, weight.columns});
  for_wide_rows(weight, [&](std::int64_t first, const at::Tensor& wide) {
    rows_of_dx.addmm_(rows_of_dy.narrow(1, first, wide.size(0)), wide, first == 0 ? 0.0 : 1.0);
  });
  return dx;
}

}  // namespace phalanx::kernels
