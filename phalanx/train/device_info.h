// Describes the device of a rank and its memory use, for start-up lines, for the log's memory and MFU, and for the
// report.
//
// MFU needs the peak of the device. For GPUs it is the vendor's figure (log_line.h). A CPU has no figure that holds for
// all clock speeds and instruction sets, so its peak is measured: the best of a few square float32 matrix products by
// libtorch itself, with this rank's threads. On a CPU, MFU then says how close training comes to pure matrix products.
// An unknown GPU has no MFU.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace phalanx::train {

struct DeviceInfo {
  std::string name;               // "AMD EPYC", "NVIDIA H100 80GB HBM3"
  std::uint64_t total_bytes = 0;  // of the card; on the CPU: of the node, or the container's limit
};

DeviceInfo describe_device(c10::Device device);

/// The most memory this rank has used so far: reserved by the allocator (CUDA), resident (CPU).
std::uint64_t peak_device_bytes(c10::Device device);

/// In TFLOP/s. On the CPU each call computes for some 50 ms.
std::optional<double> device_peak_tflops(c10::Device device, const std::string& name);

/// The memory of the node, or of the innermost cgroup that limits it.
std::uint64_t host_memory_bytes();

}  // namespace phalanx::train
