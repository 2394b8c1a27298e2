// Large blocks of host memory for tensors, cached by their size, as libtorch's caching allocator of a GPU does.
//
// In malloc's heap, a small tensor that outlives its neighbours takes a part of the space of a large one, and the next
// large one has to be allocated elsewhere: activations that wait for the backward pass between large intermediate
// results can double a process's memory. Here a freed block is given only to a tensor of about its own size, and keeps
// its pages, which the kernel would have to clear again.
//
// What the process has from the pool, in use and cached, is at most kSpareBytes more than was ever in use at a time.
// Blocks that have been free for longest go back first. Whole huge pages of a block are asked for (MADV_HUGEPAGE). Any
// thread may call, and fork. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace phalanx {

class HostBlockPool {
 public:
  /// Smaller blocks are malloc's.
  static constexpr std::size_t kLeastBytes = std::size_t{1} << 20;
  static constexpr std::size_t kSpareBytes = std::size_t{256} << 20;

  HostBlockPool() = default;
  ~HostBlockPool();  // REQUIRES: no block is in use
  HostBlockPool(const HostBlockPool&) = delete;
  HostBlockPool& operator=(const HostBlockPool&) = delete;

  /// The process's, for good.
  static HostBlockPool& instance();

  struct Block {
    std::size_t bytes = 0;  // as it was asked for
    std::uint8_t tag = 0;   // the caller's value
  };
  /// Aligned to a page, not initialised. nullptr: there is no memory for it.
  /// REQUIRES: bytes are kLeastBytes or more.
  void* allocate(std::size_t bytes, std::uint8_t tag) noexcept;
  /// The block in use that begins there; none: it is not the pool's.
  std::optional<Block> find(const void* block);
  void set_tag(const void* block, std::uint8_t tag);
  Block free(void* block) noexcept;
  /// Returns the pages of all free blocks, and forgets how much was in use. Returns how many bytes they had.
  std::size_t trim() noexcept;

  struct Use {
    std::size_t in_use = 0, cached = 0, most_in_use = 0;  // bytes of blocks, rounded up
  };
  Use use();

 private:
  struct CachedBlock {
    void* block = nullptr;
    std::uint64_t freed_at = 0;
  };
  struct Pages {
    void* begin = nullptr;
    std::size_t bytes = 0;
  };
  void* reuse(std::size_t rounded) noexcept;
  Pages take_oldest() noexcept;
  static void return_pages(const Pages& pages) noexcept;

  std::mutex mutex_;
  std::unordered_map<const void*, Block> blocks_;          // in use
  std::map<std::size_t, std::deque<CachedBlock>> cached_;  // by their rounded size, the one freed last at the end
  Use use_;
  std::uint64_t frees_ = 0;
};

}  // namespace phalanx
