#include "phalanx/kernels/weight_product.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

namespace phalanx::kernels {

bool has_out_dtype(at::DeviceType type) {
  static const auto addmm = c10::Dispatcher::singleton().findSchema({"aten::addmm", "dtype_out"});
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, at::Device(type));
  return addmm && addmm->hasKernelForDispatchKey(key);
}

void add_weight_product(const at::Tensor& dy, const at::Tensor& x, const WeightGradient& dweight) {
  at::Tensor out = dweight.out;
  if (out.scalar_type() == dy.scalar_type()) {
    out.addmm_(dy.t(), x, dweight.beta);
  } else if (out.scalar_type() == at::kFloat && has_out_dtype(out.device().type())) {
    dweight.beta == 0.0 ? at::mm_out(out, dy.t(), x, at::kFloat)
                        : at::addmm_out(out, out, dy.t(), x, at::kFloat, dweight.beta);
  } else {
    const at::Tensor made = dy.t().mm(x);
    dweight.beta == 0.0 ? out.copy_(made) : out.mul_(dweight.beta).add_(made);
  }
}

}  // namespace phalanx::kernels
