// A heap for the large tensors of a process, of memory that the other processes of the machine can map: their
// collectives read and write it where it lies (direct_operation.h), as they do symmetric memory, and nobody has to say
// which tensors will be communicated (OpenSHMEM's symmetric heap, without the symmetry).
//
//   share_large_tensors();                            // shared_tensors.h; once, before the communicators are made
//   at::Tensor x = at::ones({1 << 20});               // lies there
//   world->all_reduce(x);                             // nothing goes through slots
//
// One memfd (no name in any file system, mode 0600) as long as the machine's memory, mapped whole; pages are taken when
// first touched, so it costs addresses only. Peers open it through /proc/<pid>/fd, as they do segments
// (shared_pages.h); a random token in its first page proves that it is the right one. Blocks are whole pages, the
// smallest free one that suffices is taken, neighbours are joined. Pages of free blocks stay, for the next one, up to
// `cached_bytes`, then go back to the kernel.
//
// A forked child has the tensors that were there, and may write to them: what it writes is its own. What it makes anew
// is ordinary memory, unless it starts a heap itself. Torch-free; any thread.
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
  std::size_t reserved_bytes = 0;                     // addresses; 0: as much as the machine has memory
  std::size_t cached_bytes = std::size_t{256} << 20;  // pages of free blocks that are not given back
};

class SharedHeap {
 public:
  /// Smaller blocks are left to malloc: collectives copy them through slots in any case.
  static constexpr std::size_t kLeastBytes = std::size_t{16} << 10;

  /// For this process, for good; if there is one, it stays as it is. Throws CommError without memory or /proc.
  static void start(const SharedHeapOptions& options = {});
  /// nullptr before start(), and in a forked child.
  static SharedHeap* current() noexcept;
  /// The heap, perhaps of a parent process, that a block lies in; nullptr: in none.
  static SharedHeap* owner_of(const void* data) noexcept;

  /// A block for a tensor: at the beginning of a page, not initialized. nullptr: too small for it, the heap is full, or
  /// this thread has a Pause. `tag` is the caller's, kept beside the block.
  static void* try_allocate(std::size_t bytes, std::uint8_t tag = 0) noexcept;

  struct Block {
    std::size_t bytes = 0;  // whole pages
    std::uint8_t tag = 0;
  };
  /// Of a block of this heap, by the address that try_allocate() gave.
  Block at(const void* block);
  void set_tag(const void* block, std::uint8_t tag);
  /// In a forked child nothing happens: the memory is the parent's.
  Block free(void* block) noexcept;

  /// Where these bytes are, from base(); nothing if they are not all of this heap.
  std::optional<std::size_t> offset_of(const void* data, std::size_t bytes) const noexcept;
  /// A stopped peer may still write where this lies: the block will be nobody's again, also when it has been freed.
  void abandon(const void* data) noexcept;

  std::byte* base() const noexcept { return base_; }
  std::size_t bytes() const noexcept { return bytes_; }
  /// For attach(), in another process of this machine.
  const std::string& address() const noexcept { return address_; }

  /// The heap behind an address, mapped once in a process however many ask; of the own process itself. nullptr: it
  /// cannot be opened, or there is no room for it. No pages are taken.
  static std::shared_ptr<std::byte> attach(const std::string& address);

  struct Use {
    std::size_t in_use = 0;  // bytes of blocks
    std::size_t cached = 0;  // bytes of free blocks that may have pages
  };
  Use use();

  /// Until its end this thread's tensors are ordinary memory.
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

  std::size_t bytes_ = 0;
  std::size_t cache_limit_ = 0;
  int descriptor_ = -1;
  std::byte* base_ = nullptr;
  std::string address_;
  SharedHeap* inherited_ = nullptr;  // of the process that forked this one
  bool is_parents_ = false;

  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;                     // bytes, by offset
  std::set<std::pair<std::size_t, std::size_t>> free_by_size_;  // bytes, offset
  std::map<std::size_t, std::size_t> cached_;                   // bytes, by offset: parts of free blocks with pages
  std::map<std::size_t, Used> used_;                            // by offset
  std::size_t in_use_ = 0;
  std::size_t cached_bytes_ = 0;  // of all in cached_
};

}  // namespace phalanx
