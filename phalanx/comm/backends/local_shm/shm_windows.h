// Symmetric memory of an shm group. In each window every rank owns a part, which holds its tensors, and has the others'
// parts mapped, too. An operation whose ranks all have their data in one window copies nothing in or out
// (round_operation.h).
//
// A window lives as long as the tensors in it. A rank keeps its peers' parts mapped as long as its own tensor lives. A
// peer may have freed its tensor by then; the memory still exists.
//
// If every rank has a shared heap (shared_heap.h), the heaps form one more window, which always exists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/comm/backends/local_shm/control_block.h"
#include "phalanx/comm/backends/local_shm/shared_pages.h"
#include "phalanx/comm/types.h"
#include "phalanx/observe/memory_counters.h"

namespace phalanx {

class ShmWindow {
 public:
  struct Form {
    std::size_t bytes = 0;  // of one rank's part
    int rank = 0;
    int size = 0;  // number of ranks
    SymmetricOptions options;
  };
  ShmWindow(const std::shared_ptr<SharedPages>& pages, std::uint64_t number, std::size_t stride, const Form& form);
  /// A window of heaps. own_bytes: the size of this rank's heap.
  ShmWindow(std::vector<std::shared_ptr<std::byte>> heaps, std::size_t own_bytes, int rank);
  ~ShmWindow();
  ShmWindow(const ShmWindow&) = delete;
  ShmWindow& operator=(const ShmWindow&) = delete;

  std::uint64_t number() const noexcept { return number_; }  // 1, 2, ...: the same on all ranks
  std::byte* part(int rank) const noexcept { return parts_[static_cast<std::size_t>(rank)].get(); }
  /// Whether these bytes are in this rank's part.
  bool holds(const void* data, std::size_t bytes) const noexcept;
  std::size_t offset_of(const void* data) const noexcept {
    return static_cast<std::size_t>(static_cast<const std::byte*>(data) - part(rank_));
  }
  /// An operation is done with the peers' parts. Unless they are to stay mapped, their pages leave this process's page
  /// tables; their contents stay.
  void leave_peers() const noexcept;
  /// A peer may still write there at any time: the memory must never be reused for another tensor.
  void abandon(const void* data) const noexcept;

 private:
  static constexpr std::uint64_t kHeaps = ~std::uint64_t{0};

  std::vector<std::shared_ptr<std::byte>> parts_;
  std::uint64_t number_;
  std::size_t stride_;  // bytes of a part, in whole pages
  int rank_;
  bool keeps_peers_mapped_;
  observe::MemoryCategory category_;  // where this rank's part is counted; not for a heap, which counts its blocks
};

/// The windows of one rank. Any thread may call.
class ShmWindows {
 public:
  /// Collective over the form's ranks, through `exchange`. form.bytes is the same on all. The memory is zero, and the
  /// pages of this rank's part are allocated. Throws CommError on every rank if one of them has no memory.
  std::shared_ptr<ShmWindow> make(const ShmWindow::Form& form, const SharedPages::Exchange& exchange);
  /// addresses[r]: rank r's SharedHeap::address(), empty without a heap. If one is missing or cannot be mapped, nothing
  /// changes: the ranks then see that this rank's data is in no window.
  void add_heaps(const std::vector<std::string>& addresses, int rank);
  /// The window that holds these bytes in this rank's part, or nullptr.
  std::shared_ptr<ShmWindow> find(const void* data, std::size_t bytes);

 private:
  std::shared_ptr<ShmWindow> heaps_;
  std::mutex mutex_;
  std::uint64_t made_ = 0;
  std::vector<std::weak_ptr<ShmWindow>> windows_;
};

}  // namespace phalanx
