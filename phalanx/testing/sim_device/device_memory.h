// DeviceMemory: the addresses of all simulated devices. The host cannot touch them: a read or write is a fault. Kernels
// use kernel_view(), which is the same memory at an address that can be used.
//
// Addresses are handed out by the allocator (caching_allocator.h). Pages cost nothing until a kernel touches them.
#pragma once

#include <cstddef>

namespace phalanx::sim_device {

inline constexpr int kDevices = 8;

class DeviceMemory {
 public:
  static constexpr std::size_t kBytesPerDevice = std::size_t{1} << 34;

  DeviceMemory();
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* begin(int device) const { return base_ + static_cast<std::size_t>(device) * kBytesPerDevice; }
  bool owns(const void* address) const { return address >= base_ && address < base_ + kTotal; }
  /// REQUIRES: owns(address).
  int device_of(const void* address) const {
    return static_cast<int>(static_cast<std::size_t>(static_cast<const std::byte*>(address) - base_) / kBytesPerDevice);
  }
  /// REQUIRES: owns(address).
  std::byte* kernel_view(const void* address) const {
    return const_cast<std::byte*>(static_cast<const std::byte*>(address)) + kTotal;
  }
  /// Gives the pages back to the system. Their contents are lost.
  void discard(std::byte* begin, std::size_t bytes) const;

 private:
  static constexpr std::size_t kTotal = kBytesPerDevice * kDevices;
  std::byte* base_;
};

}  // namespace phalanx::sim_device
