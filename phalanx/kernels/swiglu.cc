#include "phalanx/kernels/swiglu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/silu.h>

namespace phalanx::kernels {

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; }

}  // namespace phalanx::kernels
