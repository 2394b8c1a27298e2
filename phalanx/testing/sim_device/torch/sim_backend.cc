#include "phalanx/testing/sim_device/torch/sim_backend.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>

#include "phalanx/testing/sim_device/host_faults.h"
#include "phalanx/testing/sim_device/torch/registration.h"

namespace phalanx::sim_device {
namespace {

// Kernels run below autograd, each on one core.
void prepare_stream_thread() {
  at::set_num_threads(1);
  thread_local const at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::GradMode::set_enabled(false);
}

}  // namespace

SimBackend::SimBackend() : runtime(&prepare_stream_thread) {}

SimBackend& sim_backend() {
  static SimBackend& backend = []() -> SimBackend& {
    auto& made = *new SimBackend;  // never destroyed: libtorch may free tensors at the very end of the process
    c10::register_privateuse1_backend("sim");
    register_allocators(made);
    register_device_guard(made);
    register_hooks(made);
    register_operators(made);
    register_autocast();
    register_gpu_kernels(made);
    handle_host_faults(&made.runtime);
    return made;
  }();
  return backend;
}

}  // namespace phalanx::sim_device
