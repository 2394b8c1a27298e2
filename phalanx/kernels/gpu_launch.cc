#include "phalanx/kernels/gpu_launch.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <array>
#include <atomic>

#include "phalanx/base/error.h"

namespace phalanx::kernels {
namespace {

std::atomic<int> host_kernels_in_use{0};
std::array<std::atomic<const gpu::GpuKernels*>, at::COMPILE_TIME_MAX_DEVICE_TYPES> registered{};  // by type

}  // namespace

gpu::Type gpu_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return gpu::Type::f32;
    case at::kBFloat16:
      return gpu::Type::bf16;
    case at::kHalf:
      return gpu::Type::f16;
    default:
      throw Error(fmt::format("GPU kernels: expected float32, bfloat16 or float16, found {}", c10::toString(type)));
  }
}

const gpu::GpuKernels* gpu_kernels_on(at::DeviceType type) noexcept {
  if (type == at::kCUDA) return gpu::cuda_kernels();
  if (type == at::kCPU && host_kernels_in_use.load(std::memory_order_relaxed) > 0) return &gpu::host_kernels();
  return registered[static_cast<std::size_t>(type)].load(std::memory_order_acquire);
}

void register_gpu_kernels(at::DeviceType type, const gpu::GpuKernels* kernels) noexcept {
  registered[static_cast<std::size_t>(type)].store(kernels, std::memory_order_release);
}

GpuLaunch::GpuLaunch(const gpu::GpuKernels& kernels, at::Device device) : kernels_(&kernels) {
  if (device.is_cpu()) return;
  guard_.reset_device(device);
  const c10::impl::VirtualGuardImpl impl(device.type());
  stream_ = impl.getStreamNativeHandle(impl.getStream(device));
}

void GpuLaunch::check(const char* operation, const char* error) {
  if (error != nullptr) throw Error(fmt::format("{} on the GPU: {}", operation, error));
}

void require_no_graph(const char* operation) {
  if (!at::GradMode::is_enabled()) return;
  throw Error(fmt::format("{} on the GPU has no second derivative: run backward() without create_graph", operation));
}

HostGpuKernels::HostGpuKernels() { ++host_kernels_in_use; }
HostGpuKernels::~HostGpuKernels() { --host_kernels_in_use; }

}  // namespace phalanx::kernels
