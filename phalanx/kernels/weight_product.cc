#include "phalanx/kernels/weight_product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

namespace phalanx::kernels {

void add_weight_product(const at::Tensor& dy, const at::Tensor& x, const WeightGradient& dweight) {
  at::Tensor out = dweight.out;
  if (out.scalar_type() == dy.scalar_type()) {
    out.addmm_(dy.t(), x, dweight.beta);
  } else if (out.device().is_cuda() && out.scalar_type() == at::kFloat) {
    dweight.beta == 0.0 ? at::mm_out(out, dy.t(), x, at::kFloat)
                        : at::addmm_out(out, out, dy.t(), x, at::kFloat, dweight.beta);
  } else {
    const at::Tensor made = dy.t().mm(x);
    dweight.beta == 0.0 ? out.copy_(made) : out.mul_(dweight.beta).add_(made);
  }
}

}  // namespace phalanx::kernels
