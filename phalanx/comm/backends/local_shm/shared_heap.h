// A process's heap for large tensors, in memory that the other processes of the node can map. Their collectives read
// and write it in place (round_operation.h), as they do with symmetric memory. The caller need not say which tensors
// will be communicated. Like OpenSHMEM's symmetric heap, without the symmetry.
//
//   share_large_tensors();                            // shared_tensors.h; once, before the communicators are made
//   at::Tensor x = at::ones({1 << 20});               // allocated in the heap
//   world->all_reduce(x);                             // nothing goes through slots
//
// The heap is one memfd (no name in any file system, mode 0600), as large as the node's memory and mapped as a whole.
// Pages are allocated when first touched, so an unused heap costs only addresses. Peers open it through /proc/<pid>/fd,
// as they do segments (shared_pages.h). A random token in its first page proves that it is the right one. Blocks are
// whole pages. The allocator takes the smallest free block that suffices and merges free neighbours. Pages of free
// blocks are cached for later blocks, up to `cached_bytes`; the rest goes back to the kernel.
//
// A forked child has the tensors that existed, and may write to them; its writes are private. Where it can have no
// private copy, it says so, and dies if it touches them. Its new tensors are ordinary memory, unless it starts a heap
// itself. Torch-free. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace phalanx {

struct SharedHeapOptions {
  std::size_t reserved_bytes = 0;                     // address space; 0: as much as the node has memory
  std::size_t cached_bytes = std::size_t{256} << 20;  // pages of free blocks that are not returned to the kernel
};

class SharedHeap {
 public:
  /// Smaller blocks are left to malloc: collectives copy them through slots in any case.
  static constexpr std::size_t kLeastBytes = std::size_t{16} << 10;

  /// Starts the process's heap, for good. If there is one, it stays as it is. Throws CommError without memory or /proc.
  static void start(const SharedHeapOptions& options = {});
  /// nullptr before start(), and in a forked child.
  static SharedHeap* current() noexcept;
  /// The heap (perhaps a parent process's) that contains the block; nullptr: none.
  static SharedHeap* owner_of(const void* data) noexcept;

  /// A block for a tensor: page-aligned, not initialized. nullptr: the size is too small, the heap is full, or this
  /// thread has a Pause. `tag` is the caller's value, stored with the block.
  static void* try_allocate(std::size_t bytes, std::uint8_t tag = 0) noexcept;

  struct Block {
    std::size_t bytes = 0;  // whole pages
    std::uint8_t tag = 0;
  };
  /// The block of this heap at the address that try_allocate() returned.
  Block at(const void* block);
  void set_tag(const void* block, std::uint8_t tag);
  /// In a forked child it does nothing: the memory is the parent's.
  Block free(void* block) noexcept;

  /// The offset of these bytes from base(); nullopt if they are not all in this heap.
  std::optional<std::size_t> offset_of(const void* data, std::size_t bytes) const noexcept;
  /// A stopped peer may still write to the block at this address: the heap never reuses it, even after it was freed.
  void abandon(const void* data) noexcept;

  std::byte* base() const noexcept { return base_; }
  std::size_t bytes() const noexcept { return bytes_; }
  /// For attach() in another process of this node.
  const std::string& address() const noexcept { return address_; }

  /// The heap behind an address, mapped only once per process. Also works for this process's own heap. nullptr: it
  /// cannot be opened, or there is no room for it. Allocates no pages.
  static std::shared_ptr<std::byte> attach(const std::string& address);

  struct Use {
    std::size_t in_use = 0;  // bytes of blocks
    std::size_t cached = 0;  // bytes of free blocks that may have pages
  };
  Use use();

  /// While it lives, this thread's tensors are ordinary memory.
  class [[nodiscard]] Pause {
   public:
    Pause() noexcept;
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;
  };

 private:
  struct Used {
    std::size_t bytes = 0;
    std::uint8_t tag = 0;
    bool is_abandoned = false;
  };

  explicit SharedHeap(const SharedHeapOptions& options);
  void* allocate(std::size_t bytes, std::uint8_t tag) noexcept;
  void add_free(std::size_t offset, std::size_t bytes);
  void remove_free(std::map<std::size_t, std::size_t>::iterator block);
  void cache(std::size_t offset, std::size_t bytes);
  void uncache(std::size_t offset, std::size_t bytes);
  void trim();
  static void on_fork_in_child() noexcept;
  void lose_access() noexcept;

  std::size_t bytes_ = 0;
  std::size_t cache_limit_ = 0;
  int descriptor_ = -1;
  std::byte* base_ = nullptr;
  std::string address_;
  SharedHeap* inherited_ = nullptr;  // heap of the process that forked this one
  bool is_parents_ = false;

  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;                     // bytes, by offset
  std::set<std::pair<std::size_t, std::size_t>> free_by_size_;  // bytes, offset
  std::map<std::size_t, std::size_t> cached_;                   // bytes, by offset: parts of free blocks with pages
  std::map<std::size_t, Used> used_;                            // by offset
  std::size_t in_use_ = 0;
  std::size_t cached_bytes_ = 0;  // sum over cached_
};

}  // namespace phalanx
