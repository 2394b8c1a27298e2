// PinnedPool: pinned host memory that is used again. To allocate or free pinned memory is slow, and may wait for the
// whole device, so the pool keeps every block as long as it lives. Blocks have power-of-two sizes.
//
//   std::shared_ptr<std::byte> block = pool.take(bytes);
//   // ... until the device and the host are done with it ...
//   pool.give_back(bytes, std::move(block));
#pragma once

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "phalanx/comm/device/device_streams.h"

namespace phalanx {

/// Any thread may call.
class PinnedPool {
 public:
  explicit PinnedPool(std::shared_ptr<DeviceStreams> streams) : streams_(std::move(streams)) {}

  std::shared_ptr<std::byte> take(std::size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      auto& free = free_[block_size(bytes)];
      if (!free.empty()) {
        std::shared_ptr<std::byte> block = std::move(free.back());
        free.pop_back();
        return block;
      }
    }
    return streams_->make_pinned(block_size(bytes));
  }
  /// `bytes` as in take().
  void give_back(std::size_t bytes, std::shared_ptr<std::byte> block) {
    const std::lock_guard lock(mutex_);
    free_[block_size(bytes)].push_back(std::move(block));
  }

 private:
  static std::size_t block_size(std::size_t bytes) { return std::bit_ceil(std::max(bytes, std::size_t{4096})); }

  std::shared_ptr<DeviceStreams> streams_;
  std::mutex mutex_;
  std::map<std::size_t, std::vector<std::shared_ptr<std::byte>>> free_;
};

}  // namespace phalanx
