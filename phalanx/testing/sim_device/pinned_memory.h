// PinnedMemory: host memory that simulated devices can read and write directly.
//
// While a device may still use a block, and the host has not waited for it, the block's pages are protected: against
// writes while a kernel reads them, against any use while a kernel writes them. Kernels use kernel_view(), which is not
// protected. So a host that reads before it waited for the copy is caught, however fast the copy was (host_faults.h).
// Only loads and stores are caught; a system call on such memory fails with EFAULT.
//
// A freed block is reused once its last use is done, as libtorch does.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/testing/sim_device/vector_clock.h"

namespace phalanx::sim_device {

class PinnedMemory {
 public:
  /// One use of a block by a kernel.
  struct Use {
    Stamp stamp;
    bool is_write = false;
    const char* operation = "";
    std::function<bool()> is_done;  // whether the device is done with it, whatever the host knows
  };

  PinnedMemory();
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  /// Blocks start on a page, and share none.
  std::byte* allocate(std::size_t bytes);
  /// How large a block for that many bytes is.
  static std::size_t block_size(std::size_t bytes);
  void release(std::byte* block);
  bool owns(const void* address) const { return address >= host_ && address < host_ + kBytes; }
  /// REQUIRES: owns(address).
  std::byte* kernel_view(const void* address) const {
    return kernel_ + (static_cast<const std::byte*>(address) - host_);
  }

  /// REQUIRES: owns(address).
  void used(const void* address, Use use);
  /// The host has waited for what the clock covers.
  void host_joined(const VectorClock& host);
  /// A host access hit a protected page: unprotects the block and returns the use that the host should have waited for.
  /// nullopt: the fault has another cause.
  std::optional<Use> take_conflict(const void* address, bool is_write);

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 34;
  struct Block {
    std::size_t bytes = 0;
    bool is_free = false;
    std::vector<Use> uses;
  };
  using Blocks = std::map<std::byte*, Block>;

  Blocks::iterator find(const void* address);
  static void protect(const Blocks::value_type& block);

  std::byte* host_;
  std::byte* kernel_;
  std::mutex mutex_;
  Blocks blocks_;
  std::size_t taken_ = 0;
};

}  // namespace phalanx::sim_device
