// CachingAllocator: gives out device memory in stream order, with the sizes and rules of libtorch's CUDA allocator.
//
// - Requests are rounded up to 512 bytes. Segments are 2 MiB for requests up to 1 MiB, 20 MiB for those below 10 MiB,
//   and else the request rounded up to 2 MiB. So reserved bytes and fragmentation are those of a GPU.
// - A block belongs to the stream that allocated it. Freed, it may be given to that stream again at once: the stream's
//   order keeps users apart. Other streams that use it must be named by record_stream(); then it is free once what they
//   had launched before the free is done.
// - Freed memory, and memory that was never used, is filled with NaN patterns by a kernel of the block's stream. That
//   kernel is a write like any other: a use that record_stream() does not know of is a race with 'free'.
//
//   std::byte* p = allocator.allocate({0, 0}, 4096);
//   allocator.record_stream(p, {0, 3});
//   allocator.free(p);
//
// Any thread may call.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/testing/sim_device/runtime.h"

namespace phalanx::sim_device {

class DeviceOutOfMemory : public Error {
 public:
  using Error::Error;
};

struct MemoryStats {
  std::size_t allocated = 0;  // bytes of blocks in use, rounded
  std::size_t reserved = 0;   // bytes of segments
  std::size_t requested = 0;  // bytes that those blocks were asked for: blocks of 1 MiB and more are up to 1 MiB larger
  std::size_t peak_allocated = 0;
  std::size_t peak_requested = 0;
  std::size_t peak_reserved = 0;
  std::size_t allocations = 0;
  std::size_t reuses = 0;  // allocations that needed no new segment
  std::size_t capacity = DeviceMemory::kBytesPerDevice;
};

class CachingAllocator {
 public:
  explicit CachingAllocator(Runtime& runtime);
  ~CachingAllocator();

  /// Throws DeviceOutOfMemory if the device's capacity is exceeded even without cached segments.
  /// REQUIRES: bytes > 0.
  std::byte* allocate(StreamId stream, std::size_t bytes);
  void free(std::byte* block);
  /// `address` may lie anywhere in a block. The block's own stream needs no record.
  void record_stream(const void* address, StreamId stream);
  /// Waits for the device, and gives back the segments that are not in use.
  void empty_cache(int device);

  MemoryStats stats(int device) const;
  void reset_peaks(int device);
  void set_capacity(int device, std::size_t bytes);

 private:
  struct Block;
  struct ByStreamAndSize {
    bool operator()(const Block* a, const Block* b) const;
  };
  using FreeBlocks = std::set<Block*, ByStreamAndSize>;
  struct Device;

  Block* take_free(Device& device, StreamId stream, std::size_t size);
  Block* new_segment(Device& device, StreamId stream, std::size_t size);
  std::byte* take_addresses(Device& device, std::size_t size);
  void split(Device& device, Block* block, std::size_t size);
  void make_free(Device& device, Block* block);
  void merge(Device& device, Block* block, Block* neighbour);
  void finish_recorded_uses(Device& device);
  void release_segments(Device& device);
  void poison(const Block& block, const char* name);

  Runtime& runtime_;
  std::array<std::unique_ptr<Device>, kDevices> devices_;
};

}  // namespace phalanx::sim_device
