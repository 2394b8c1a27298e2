#include "phalanx/kernels/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>

namespace phalanx::kernels {

at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::int64_t half = x.size(-1) / 2;
  const auto table = [&](const at::Tensor& t) {
    const at::Tensor cast = t.to(x.scalar_type());
    return cast.dim() == 3 ? cast.unsqueeze(1) : cast;  // the same angles for every head
  };
  const at::Tensor c = table(cos), s = table(sin);
  const at::Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  return at::cat({a * c - b * s, b * c + a * s}, -1);
}

}  // namespace phalanx::kernels
