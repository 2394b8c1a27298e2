// What the device of a rank is and how much of it is in use: for start-up lines, the log's memory and MFU, the report.
//
// MFU needs the device's peak. For GPUs it is the makers' figure (log_line.h). A CPU has none that holds for all clock
// speeds and instruction sets, so it is measured: the best of a few square float32 matrix products by libtorch itself,
// with this rank's threads; MFU then says how near training comes to pure matrix products. An unknown GPU has no MFU.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace phalanx::train {

struct DeviceInfo {
  std::string name;               // "AMD EPYC", "NVIDIA H100 80GB HBM3"
  std::uint64_t total_bytes = 0;  // of the card; on the CPU of the machine, or the container's limit
};

DeviceInfo describe_device(c10::Device device);

/// The most memory this rank has held: reserved by the allocator (CUDA), resident (CPU).
std::uint64_t peak_device_bytes(c10::Device device);

/// TFLOP/s; on the CPU this takes some 50 ms of computing at each call.
std::optional<double> device_peak_tflops(c10::Device device, const std::string& name);

/// Memory of the machine, or of the innermost cgroup that limits it.
std::uint64_t host_memory_bytes();

}  // namespace phalanx::train
