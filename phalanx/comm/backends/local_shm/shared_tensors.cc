#include "phalanx/comm/backends/local_shm/shared_tensors.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>

namespace phalanx {
namespace {

c10::Allocator* others = nullptr;  // libtorch's; allocates all other tensors

void free_shared(void* block) {
  if (block != nullptr) SharedHeap::owner_of(block)->free(block);
}

void free_any(void* block) {
  if (SharedHeap::owner_of(block) != nullptr)
    free_shared(block);
  else
    others->raw_deleter()(block);
}

class SharingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const block = SharedHeap::try_allocate(bytes);
    if (block == nullptr) return others->allocate(bytes);
    return {block, block, &free_shared, c10::DeviceType::CPU};
  }
  // For callers that know only the address.
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void share_large_tensors(const SharedHeapOptions& options) {
  SharedHeap::start(options);
  static std::once_flag once;
  std::call_once(once, [] {
    others = c10::GetCPUAllocator();
    // The counting allocator (tensor/counting_allocator.h) has priority over this one and uses the heap itself.
    c10::SetCPUAllocator(new SharingAllocator, /*priority=*/0);
  });
}

}  // namespace phalanx
