// Compiled by nvcc without contraction to fused multiply-adds; see host_kernels.cc.
#include <cuda_runtime_api.h>

#include "phalanx/kernels/gpu/cuda_block.h"
#include "phalanx/kernels/gpu/kernels_body.h"

namespace phalanx::kernels::gpu {
namespace {

template <class Body>
__global__ __launch_bounds__(Body::kLargestBlock) void kernel(const __grid_constant__ Body body) {
  CudaBlock block;
  body(block);
}

struct CudaLauncher {
  template <class Body>
  static const char* run(void* stream, std::int64_t blocks, int blocks_y, int lanes, const Body& body) {
    void* arguments[] = {const_cast<Body*>(&body)};
    const cudaError_t error =
        cudaLaunchKernel(reinterpret_cast<const void*>(&kernel<Body>),
                         dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(blocks_y)),
                         dim3(static_cast<unsigned>(lanes)), arguments, 0, static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) return nullptr;
    (void)cudaGetLastError();  // reported here, and not by the next call of somebody else
    return cudaGetErrorString(error);
  }
};

}  // namespace

const GpuKernels* cuda_kernels() {
  static constexpr GpuKernels kernels = Kernels<CudaLauncher>::table("cuda");
  return &kernels;
}

}  // namespace phalanx::kernels::gpu
