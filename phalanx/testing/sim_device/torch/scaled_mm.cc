// at::_scaled_mm_out, products of float8 numbers, with the checks of arguments that CUDA has.
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <optional>

#include "phalanx/testing/sim_device/torch/kernel_tensors.h"
#include "phalanx/testing/sim_device/torch/native_operators.h"

namespace phalanx::sim_device {
namespace {

using at::ScalarType;
using at::Tensor;

void check_scales(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b) {
  TORCH_CHECK(scale_a.scalar_type() == at::kFloat && scale_b.scalar_type() == at::kFloat,
              "_scaled_mm: scales must be float32");
  if (scale_a.numel() == 1 && scale_b.numel() == 1) return;
  TORCH_CHECK(scale_a.dim() == 2 && scale_a.size(0) == a.size(0) && scale_a.size(1) == 1 && scale_a.is_contiguous() &&
                  scale_b.dim() == 2 && scale_b.size(0) == 1 && scale_b.size(1) == b.size(1) && scale_b.is_contiguous(),
              "_scaled_mm: expected one scale each, or scales [m, 1] and [1, n]; found ", scale_a.sizes(), " and ",
              scale_b.sizes());
}

bool is_at_multiple_of_16(const Tensor& x) { return reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0; }

void check(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
           const std::optional<Tensor>& bias, const std::optional<Tensor>& scale_result,
           std::optional<ScalarType> out_dtype, const Tensor& out) {
  const auto is_float8 = [](const Tensor& t) {
    return t.scalar_type() == at::kFloat8_e4m3fn || t.scalar_type() == at::kFloat8_e5m2;
  };
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), "_scaled_mm: sizes ", a.sizes(), " and ",
              b.sizes(), " cannot be multiplied");
  TORCH_CHECK(is_float8(a) && is_float8(b), "_scaled_mm: expected float8 factors, found ", a.scalar_type(), " and ",
              b.scalar_type());
  TORCH_CHECK(a.scalar_type() != at::kFloat8_e5m2 || b.scalar_type() != at::kFloat8_e5m2,
              "_scaled_mm: a product of two e5m2 matrices is not supported");
  TORCH_CHECK(a.stride(1) == 1 && b.stride(0) == 1, "_scaled_mm: expected row-major times column-major");
  TORCH_CHECK(a.size(1) % 16 == 0 && b.size(1) % 16 == 0, "_scaled_mm: ", a.sizes(), " and ", b.sizes(),
              ": expected multiples of 16");
  TORCH_CHECK(is_at_multiple_of_16(a) && is_at_multiple_of_16(b) && is_at_multiple_of_16(out),
              "_scaled_mm: expected addresses that are multiples of 16");
  TORCH_CHECK(!bias && !scale_result, "_scaled_mm: no bias and no scale_result on this device");
  TORCH_CHECK(!out_dtype || *out_dtype == out.scalar_type(), "_scaled_mm: out_dtype is not out's type");
  TORCH_CHECK(out.sizes() == at::IntArrayRef({a.size(0), b.size(1)}) && out.is_contiguous() &&
                  (out.scalar_type() == at::kFloat || out.scalar_type() == at::kBFloat16),
              "_scaled_mm: expected a result [", a.size(0), ", ", b.size(1), "] in float32 or bfloat16");
  check_scales(a, b, scale_a, scale_b);
}

Tensor& scaled_mm_out(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                      const std::optional<Tensor>& bias, const std::optional<Tensor>& scale_result,
                      std::optional<ScalarType> out_dtype, bool /*use_fast_accum*/, Tensor& out) {
  check(a, b, scale_a, scale_b, bias, scale_result, out_dtype, out);
  std::vector<Access> accesses = accesses_of(a, out);
  for (const Tensor* read : {&b, &scale_a, &scale_b}) add_accesses(accesses, *read, false);
  launch(
      out.device().index(), "aten::_scaled_mm.out", std::move(accesses),
      [a = kernel_view(a), b = kernel_view(b), scale_a = kernel_view(scale_a), scale_b = kernel_view(scale_b),
       out = kernel_view(out)] { out.copy_(at::mm(a.to(at::kFloat), b.to(at::kFloat)).mul_(scale_a).mul_(scale_b)); });
  return out;
}

}  // namespace

void register_scaled_mm(torch::Library& library) { library.impl("_scaled_mm.out", &scaled_mm_out); }

}  // namespace phalanx::sim_device
