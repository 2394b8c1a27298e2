// Autocast on the simulated devices, by the lists that libtorch uses for CUDA.
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "phalanx/testing/sim_device/torch/registration.h"

namespace phalanx::sim_device {
namespace {

using at::Scalar;
using at::ScalarType;
using at::Tensor;
using c10::IntArrayRef;

// libtorch's lists are macros over a library `m`.
void register_casts(torch::Library& m) {
#define PHALANX_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define PHALANX_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PHALANX_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PHALANX_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(PHALANX_LOWER_PRECISION)
  AT_FORALL_FP32(PHALANX_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(PHALANX_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PHALANX_PROMOTE)
  m.impl("cat", &at::autocast::WrapFunction<at::autocast::CastPolicy::promote, c10::DeviceType::PrivateUse1,
                                            decltype(ATEN_FN(cat)), decltype(ATEN_FN(cat)), &ATEN_FN(cat)>::type::call);
  m.impl("stack",
         &at::autocast::WrapFunction<at::autocast::CastPolicy::promote, c10::DeviceType::PrivateUse1,
                                     decltype(ATEN_FN(stack)), decltype(ATEN_FN(stack)), &ATEN_FN(stack)>::type::call);
}

}  // namespace

void register_autocast() {
  constexpr auto kKey = c10::DispatchKey::AutocastPrivateUse1;
  auto& others = *new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  others.fallback(torch::CppFunction::makeFallthrough());
  auto& casts = *new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  register_casts(casts);
}

}  // namespace phalanx::sim_device
