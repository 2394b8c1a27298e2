#include "phalanx/testing/sim_device/torch/out_dtype.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "phalanx/testing/sim_device/torch/kernel_tensors.h"
#include "phalanx/testing/sim_device/torch/native_operators.h"

namespace phalanx::sim_device {
namespace {

using at::Scalar;
using at::ScalarType;
using at::Tensor;

void check_types(const Tensor& a, const Tensor& b, ScalarType out_dtype, const Tensor& out) {
  const bool is_narrow = a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kHalf;
  TORCH_CHECK(
      is_narrow && b.scalar_type() == a.scalar_type() && out_dtype == at::kFloat && out.scalar_type() == at::kFloat,
      "mm with out_dtype: expected factors of one 16-bit type and a result in float32, found ", a.scalar_type(),
      " and ", b.scalar_type(), ", out_dtype ", out_dtype, ", a result in ", out.scalar_type());
}

// On the CPU.

Tensor& mm_on_cpu(const Tensor& a, const Tensor& b, ScalarType out_dtype, Tensor& out) {
  check_types(a, b, out_dtype, out);
  return at::mm_out(out, a.to(at::kFloat), b.to(at::kFloat));
}

Tensor& addmm_on_cpu(const Tensor& self, const Tensor& a, const Tensor& b, ScalarType out_dtype, const Scalar& beta,
                     const Scalar& alpha, Tensor& out) {
  check_types(a, b, out_dtype, out);
  return at::addmm_out(out, self, a.to(at::kFloat), b.to(at::kFloat), beta, alpha);
}

// On a simulated device.

Tensor& mm_on_sim(const Tensor& a, const Tensor& b, ScalarType out_dtype, Tensor& out) {
  check_types(a, b, out_dtype, out);
  std::vector<Access> accesses = accesses_of(a, out);
  add_accesses(accesses, b, false);
  launch(out.device().index(), "aten::mm.dtype_out", std::move(accesses),
         [=, a = kernel_view(a), b = kernel_view(b), out = kernel_view(out)]() mutable {
           mm_on_cpu(a, b, out_dtype, out);
         });
  return out;
}

Tensor& addmm_on_sim(const Tensor& self, const Tensor& a, const Tensor& b, ScalarType out_dtype, const Scalar& beta,
                     const Scalar& alpha, Tensor& out) {
  check_types(a, b, out_dtype, out);
  std::vector<Access> accesses = accesses_of(a, out);
  add_accesses(accesses, b, false);
  add_accesses(accesses, self, false);
  launch(out.device().index(), "aten::addmm.dtype_out", std::move(accesses),
         [=, self = kernel_view(self), a = kernel_view(a), b = kernel_view(b), out = kernel_view(out)]() mutable {
           addmm_on_cpu(self, a, b, out_dtype, beta, alpha, out);
         });
  return out;
}

}  // namespace

void register_out_dtype(torch::Library& library) {
  library.impl("mm.dtype_out", &mm_on_sim);
  library.impl("addmm.dtype_out", &addmm_on_sim);
}

std::shared_ptr<void> register_out_dtype_on_cpu() {
  auto library =
      std::make_shared<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library->impl("mm.dtype_out", &mm_on_cpu);
  library->impl("addmm.dtype_out", &addmm_on_cpu);
  return library;
}

}  // namespace phalanx::sim_device
