// Device memory and pinned memory as libtorch's allocators.
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "phalanx/testing/sim_device/torch/registration.h"

namespace phalanx::sim_device {
namespace {

class DeviceTensorAllocator final : public c10::DeviceAllocator {
 public:
  explicit DeviceTensorAllocator(SimBackend& backend) : backend_(backend) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    const int device = current_device();
    if (bytes == 0) return {nullptr, SimBackend::device(device)};
    try {
      std::byte* block = backend_.memory.allocate(current_stream_id(device), bytes);
      return {block, block, &free_device_block, SimBackend::device(device)};
    } catch (const DeviceOutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    const auto* begin = static_cast<const std::byte*>(from);
    backend_.runtime.launch(current_stream_id(current_device()),
                            {"copy_data",
                             {{begin, bytes, false}, {to, bytes, true}},
                             [to = backend_.runtime.kernel_view(to), from = backend_.runtime.kernel_view(from), bytes] {
                               std::memcpy(to, from, bytes);
                             }});
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override { backend_.memory.empty_cache(current_device()); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    backend_.memory.record_stream(pointer.get(), {stream.device_index(), stream.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryStats ours = backend_.memory.stats(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& allocated = stats.allocated_bytes[0];
    allocated.current = static_cast<std::int64_t>(ours.allocated);
    allocated.peak = static_cast<std::int64_t>(ours.peak_allocated);
    auto& reserved = stats.reserved_bytes[0];
    reserved.current = static_cast<std::int64_t>(ours.reserved);
    reserved.peak = static_cast<std::int64_t>(ours.peak_reserved);
    return stats;
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const MemoryStats ours = backend_.memory.stats(device);
    return {ours.capacity - ours.reserved, ours.capacity};
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override { backend_.memory.reset_peaks(device); }

 private:
  static void free_device_block(void* block) {
    if (block != nullptr) sim_backend().memory.free(static_cast<std::byte*>(block));
  }

  SimBackend& backend_;
};

class PinnedTensorAllocator final : public c10::Allocator {
 public:
  explicit PinnedTensorAllocator(Runtime& runtime) : runtime_(runtime) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    std::byte* block = runtime_.allocate_pinned(bytes);
    return {block, block, &free_pinned_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void free_pinned_block(void* block) { sim_backend().runtime.pinned().release(static_cast<std::byte*>(block)); }

  Runtime& runtime_;
};

c10::Allocator* the_device_allocator = nullptr;
c10::Allocator* the_pinned_allocator = nullptr;

}  // namespace

void register_allocators(SimBackend& backend) {
  the_device_allocator = new DeviceTensorAllocator(backend);
  the_pinned_allocator = new PinnedTensorAllocator(backend.runtime);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, the_device_allocator);
}

c10::Allocator& device_allocator() { return *the_device_allocator; }
c10::Allocator& pinned_allocator() { return *the_pinned_allocator; }

}  // namespace phalanx::sim_device
