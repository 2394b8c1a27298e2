// The speed of copies between host and GPU, and between GPUs. It uses the CUDA driver, which it loads if it is there,
// so a program without CUDA can call it. Torch-free.
//
// A copy between two GPUs measures their link only if each can reach the other's memory (peer access), which must be
// enabled. Otherwise the driver copies through host memory, and the name of the row says so ("staged"). If the process
// uses these GPUs for other work too, peer access stays enabled.
//
//   // empty if there is no driver or no GPU
//   for (const GpuCopySpeed& speed : measure_gpu_copies()) fmt::print("{}\n", speed.what);
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace phalanx::measure {

/// The functions of the CUDA driver (libcuda) that copies need, by their names without version. Each returns 0 or an
/// error number. A test puts its own functions here.
struct CudaDriver {
  int (*init)(unsigned flags) = nullptr;
  int (*device_count)(int* count) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*retain_primary_context)(void** context, int device) = nullptr;
  int (*release_primary_context)(int device) = nullptr;
  int (*set_current_context)(void* context) = nullptr;
  int (*can_access_peer)(int* can, int device, int peer) = nullptr;
  int (*enable_peer_access)(void* peer_context, unsigned flags) = nullptr;  // of the current context
  int (*synchronize)() = nullptr;
  int (*allocate)(std::uint64_t* device_pointer, std::size_t bytes) = nullptr;
  int (*free)(std::uint64_t device_pointer) = nullptr;
  int (*allocate_host)(void** pointer, std::size_t bytes) = nullptr;
  int (*free_host)(void* pointer) = nullptr;
  int (*copy_to_device)(std::uint64_t to, const void* from, std::size_t bytes) = nullptr;
  int (*copy_to_host)(void* to, std::uint64_t from, std::size_t bytes) = nullptr;
  int (*copy_between)(std::uint64_t to, void* to_context, std::uint64_t from, void* from_context,
                      std::size_t bytes) = nullptr;
};

struct GpuCopySpeed {
  std::string what;  // "host to GPU0, pinned", "GPU0 to GPU0", "GPU0 to GPU1", "GPU0 to GPU1, staged"
  double bytes_per_second = 0;
};

/// Throws Error if a driver call fails; the error names the call.
std::vector<GpuCopySpeed> measure_gpu_copies(const CudaDriver& driver, std::size_t bytes = std::size_t{256} << 20);
/// Uses libcuda.so.1 of this machine. Returns an empty vector if there is no driver or no GPU.
std::vector<GpuCopySpeed> measure_gpu_copies();

}  // namespace phalanx::measure
