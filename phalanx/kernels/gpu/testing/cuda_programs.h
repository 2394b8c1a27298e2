// For the programs that run the CUDA kernels: errors that end them, the GPU's memory, and whether there is a GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "phalanx/kernels/gpu/gpu_kernels.h"

namespace phalanx::kernels::gpu {

inline std::int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}
inline void check(const char* error) {
  if (error == nullptr) return;
  std::fprintf(stderr, "%s\n", error);
  std::abort();
}

inline bool have_gpu() {
  int count = 0;
  return access("/dev/nvidiactl", F_OK) == 0 && cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

struct DeviceMemory {
  explicit DeviceMemory(std::size_t bytes) { check(cudaMalloc(&data, bytes), "cudaMalloc"); }
  ~DeviceMemory() { cudaFree(data); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data = nullptr;
};

/// `kernels_gpu_cuda_test --bench`: prints the time of each kernel. Returns the program's exit status.
int bench();

}  // namespace phalanx::kernels::gpu
