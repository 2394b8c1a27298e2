// Which of Phalanx's own GPU kernels (gpu/gpu_kernels.h) an operation on tensors may use, and how to start them.
//
//   if (const auto launch = gpu_launch(x, weight)) {
//     launch->check("rms_norm", launch->kernels().rms_norm(launch->stream(), ...));
//   }
//
// Kernels are asynchronous on the current stream of the tensors' device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <optional>

#include "phalanx/kernels/gpu/gpu_kernels.h"

namespace phalanx::kernels {

/// REQUIRES: float32, bfloat16 or float16.
gpu::Type gpu_type(at::ScalarType type);

/// The kernels for one device. While it lives, that device is the thread's current device.
class GpuLaunch {
 public:
  GpuLaunch(const gpu::GpuKernels& kernels, at::Device device);

  const gpu::GpuKernels& kernels() const noexcept { return *kernels_; }
  void* stream() const noexcept { return stream_; }

  /// Throws an Error that names the operation if a kernel returned an error.
  static void check(const char* operation, const char* error);

 private:
  const gpu::GpuKernels* kernels_;
  c10::OptionalDeviceGuard guard_;
  void* stream_ = nullptr;
};

/// nullptr if there are no kernels for that type of device.
const gpu::GpuKernels* gpu_kernels_on(at::DeviceType type) noexcept;

/// For tests: devices of this type, neither CUDA nor CPU, use these kernels, in this process. nullptr: none. A kernel's
/// stream is the native handle that the type's device guard gives. Any thread may call.
/// REQUIRES: `kernels` stay alive.
void register_gpu_kernels(at::DeviceType type, const gpu::GpuKernels* kernels) noexcept;

inline bool is_gpu_type(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

/// The kernels for these tensors if all of them are on one device that has kernels, and of a type that kernels take.
template <class... Tensors>
std::optional<GpuLaunch> gpu_launch(const at::Tensor& first, const Tensors&... others) {
  const gpu::GpuKernels* const kernels = gpu_kernels_on(first.device().type());
  if (kernels == nullptr || !is_gpu_type(first)) return std::nullopt;
  if (!((others.device() == first.device() && is_gpu_type(others)) && ...)) return std::nullopt;
  return std::optional<GpuLaunch>(std::in_place, *kernels, first.device());
}

/// For a backward function whose result has no graph: throws an Error that names the operation if a graph is asked for
/// (create_graph).
void require_no_graph(const char* operation);

/// For tests: while it lives, tensors in host memory use the kernels' host build, in this process.
class [[nodiscard]] HostGpuKernels {
 public:
  HostGpuKernels();
  ~HostGpuKernels();
  HostGpuKernels(const HostGpuKernels&) = delete;
  HostGpuKernels& operator=(const HostGpuKernels&) = delete;
};

}  // namespace phalanx::kernels
