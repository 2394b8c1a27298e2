// Compiled by nvcc without contraction to fused multiply-adds; see host_kernels.cc.
#include <cuda_runtime_api.h>

#include "phalanx/kernels/gpu/cuda_block.h"
#include "phalanx/kernels/gpu/kernels_body.h"

namespace phalanx::kernels::gpu {
namespace {

template <class Body>
__global__ __launch_bounds__(Body::kLargestBlock) void kernel(const __grid_constant__ Body body) {
  CudaBlock<false> block;
  body(block);
}

constexpr int kGroupThreads = 128;

template <class Body>
__global__ __launch_bounds__(kGroupThreads) void group_kernel(const __grid_constant__ Body body, std::int64_t blocks) {
  CudaBlock<true> block;
  if (block.index() < blocks) body(block);
}

/// Whether a body may run several blocks of up to a warp in one of CUDA's.
template <class Body>
constexpr bool in_groups() {
  if constexpr (requires { Body::kShortRows; }) return Body::kShortRows;
  return false;
}

const char* start(const void* function, std::int64_t blocks, int blocks_y, dim3 threads, void** arguments,
                  void* stream) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(blocks_y));
  const cudaError_t error = cudaLaunchKernel(function, grid, threads, arguments, 0, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return nullptr;
  (void)cudaGetLastError();  // reported here, and not by the next call of somebody else
  return cudaGetErrorString(error);
}

struct CudaLauncher {
  template <class Body>
  static const char* run(void* stream, std::int64_t blocks, int blocks_y, int lanes, const Body& body) {
    void* arguments[] = {const_cast<Body*>(&body), &blocks};
    if constexpr (in_groups<Body>()) {
      if (lanes <= 32) {
        const int groups = kGroupThreads / lanes;
        return start(reinterpret_cast<const void*>(&group_kernel<Body>), divide_up(blocks, groups), blocks_y,
                     dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(groups)), arguments, stream);
      }
    }
    return start(reinterpret_cast<const void*>(&kernel<Body>), blocks, blocks_y, dim3(static_cast<unsigned>(lanes)),
                 arguments, stream);
  }
};

// The code in this file is for compute capability 8.0 and later.
bool fits_all_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return false;
  for (int device = 0; device < count; ++device) {
    if (cuda_capability(device) < 8) return false;
  }
  return count > 0;
}

}  // namespace

int cuda_capability(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess ? major : 0;
}

const GpuKernels* cuda_kernels() {
  static constexpr GpuKernels kernels = Kernels<CudaLauncher>::table("cuda");
  static const bool fits = fits_all_devices();
  return fits ? &kernels : nullptr;
}

}  // namespace phalanx::kernels::gpu
