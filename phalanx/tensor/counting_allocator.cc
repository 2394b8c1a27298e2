#include "phalanx/tensor/counting_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <cstdint>
#include <mutex>
#include <optional>

#include "phalanx/comm/backends/local_shm/shared_heap.h"
#include "phalanx/tensor/host_block_pool.h"

namespace phalanx {
namespace {

using observe::MemoryCategory;

// A block stores its category at its end: its beginning must be aligned, and must be the address that libtorch gets
// back (raw_deallocate() knows only the address).
std::uint8_t& last_byte(void* block) { return static_cast<std::uint8_t*>(block)[malloc_usable_size(block) - 1]; }

// A sanitizer knows malloc's blocks, and what happens to them after they are freed.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kUsesPool = false;
#else
constexpr bool kUsesPool = true;
#endif

/// nullptr: it is for malloc, which also says what is wrong where there is no memory.
void* from_pool(std::size_t bytes, MemoryCategory category) {
  if (!kUsesPool || bytes < HostBlockPool::kLeastBytes) return nullptr;
  return HostBlockPool::instance().allocate(bytes, static_cast<std::uint8_t>(category));
}

void* from_heap(std::size_t bytes) {
  try {
    return c10::alloc_cpu(bytes);
  } catch (const c10::Error&) {
    if (HostBlockPool::instance().trim() == 0) throw;
    return c10::alloc_cpu(bytes);
  }
}

void free_block(void* block) {
  if (block == nullptr) return;
  if (SharedHeap* const heap = SharedHeap::owner_of(block)) {
    const SharedHeap::Block was = heap->free(block);
    return observe::record_memory_freed(static_cast<MemoryCategory>(was.tag), was.bytes, /*shared=*/true);
  }
  if (kUsesPool && HostBlockPool::instance().find(block)) {
    const HostBlockPool::Block was = HostBlockPool::instance().free(block);
    return observe::record_memory_freed(static_cast<MemoryCategory>(was.tag), was.bytes);
  }
  observe::record_memory_freed(static_cast<MemoryCategory>(last_byte(block)), malloc_usable_size(block));
  c10::free_cpu(block);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_block, c10::DeviceType::CPU};
    const MemoryCategory category = observe::MemoryScope::current();
    if (void* const shared = SharedHeap::try_allocate(bytes, static_cast<std::uint8_t>(category))) {
      observe::record_memory_allocated(category, SharedHeap::owner_of(shared)->at(shared).bytes, /*shared=*/true);
      return {shared, shared, &free_block, c10::DeviceType::CPU};
    }
    if (void* const large = from_pool(bytes, category)) {
      observe::record_memory_allocated(category, bytes);
      return {large, large, &free_block, c10::DeviceType::CPU};
    }
    void* const block = from_heap(bytes + 1);
    last_byte(block) = static_cast<std::uint8_t>(category);
    observe::record_memory_allocated(category, malloc_usable_size(block));
    return {block, block, &free_block, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void install_counting_allocator() {
  static std::once_flag once;
  std::call_once(once, [] { c10::SetCPUAllocator(new CountingAllocator, /*priority=*/1); });
}

void count_as(const at::Tensor& tensor, MemoryCategory category) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const c10::DataPtr& memory = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (memory.get_deleter() != &free_block || memory.get_context() == nullptr) return;
  void* const block = memory.get_context();
  if (SharedHeap* const heap = SharedHeap::owner_of(block)) {
    const SharedHeap::Block was = heap->at(block);
    heap->set_tag(block, static_cast<std::uint8_t>(category));
    observe::record_memory_freed(static_cast<MemoryCategory>(was.tag), was.bytes, /*shared=*/true);
    return observe::record_memory_allocated(category, was.bytes, /*shared=*/true);
  }
  if (const auto was = kUsesPool ? HostBlockPool::instance().find(block) : std::nullopt) {
    HostBlockPool::instance().set_tag(block, static_cast<std::uint8_t>(category));
    observe::record_memory_freed(static_cast<MemoryCategory>(was->tag), was->bytes);
    return observe::record_memory_allocated(category, was->bytes);
  }
  const auto before = static_cast<MemoryCategory>(last_byte(block));
  if (before == category) return;
  last_byte(block) = static_cast<std::uint8_t>(category);
  const std::size_t bytes = malloc_usable_size(block);
  observe::record_memory_freed(before, bytes);
  observe::record_memory_allocated(category, bytes);
}

}  // namespace phalanx
