#include "phalanx/testing/sim_device/device_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "phalanx/base/error.h"

namespace phalanx::sim_device {

DeviceMemory::DeviceMemory() {
  void* both = ::mmap(nullptr, 2 * kTotal, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (both == MAP_FAILED || ::mprotect(static_cast<std::byte*>(both) + kTotal, kTotal, PROT_READ | PROT_WRITE) != 0)
    throw Error(
        fmt::format("simulated devices: no room for {} bytes of addresses: {}", 2 * kTotal, std::strerror(errno)));
  base_ = static_cast<std::byte*>(both);
}

DeviceMemory::~DeviceMemory() { ::munmap(base_, 2 * kTotal); }

void DeviceMemory::discard(std::byte* begin, std::size_t bytes) const {
  ::madvise(kernel_view(begin), bytes, MADV_DONTNEED);
}

}  // namespace phalanx::sim_device
