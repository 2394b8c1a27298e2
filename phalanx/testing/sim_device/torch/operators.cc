// Which operator runs how on the simulated devices.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "phalanx/testing/sim_device/torch/boxed_fallback.h"
#include "phalanx/testing/sim_device/torch/native_operators.h"
#include "phalanx/testing/sim_device/torch/registration.h"

namespace phalanx::sim_device {
namespace {

torch::CppFunction boxed() { return torch::CppFunction::makeFromBoxedFunction<&run_boxed>(); }

// A fallback takes only operators that have no composite kernel. Of those that do, some have a CPU kernel, too, which
// is what must run here, so that results are the CPU's. The _foreach operators are one launch, as on CUDA. The
// composite kernel of a convolution chooses by the device, and knows no kernel for this one.
bool needs_own_registration(const c10::OperatorHandle& op) {
  const bool is_composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                            op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
  const std::string& name = op.operator_name().name;
  const std::string& overload = op.operator_name().overload_name;
  const bool is_foreach = name.starts_with("aten::_foreach_") && overload.find("out") == std::string::npos;
  const bool is_convolution = overload.empty() && (name == "aten::convolution" || name == "aten::convolution_backward");
  return name.starts_with("aten::") && !op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) &&
         ((is_composite && op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) || is_foreach || is_convolution);
}

}  // namespace

// Libraries unregister what they hold when they are destroyed, so these live for good.
void register_operators(SimBackend& /*backend*/) {
  auto& fallback = *new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  fallback.fallback(boxed());
  auto& operators =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  register_native_operators(operators);
  register_attention(operators);
  register_variable_length_attention(operators);
  register_out_dtype(operators);
  register_scaled_mm(operators);
  register_grouped_mm(operators);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !needs_own_registration(*op)) continue;
    operators.impl((name.overload_name.empty() ? name.name : name.name + "." + name.overload_name).c_str(), boxed());
  }
}

}  // namespace phalanx::sim_device
