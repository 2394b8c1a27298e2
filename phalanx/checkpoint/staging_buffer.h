// StagingBuffer copies what a rank is about to write, so that training can continue while it is written.
//
//   auto staged = buffer.copy(state.tensors, plan_save(state.tensors, local_plans, rank));
//   write_shard_file(fs, path, staged.tensors, staged.boxes);      // on another thread, until the next copy()
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phalanx/checkpoint/save_plan.h"

namespace phalanx {

/// Only the boxes, each a tensor in host memory.
struct StagedBoxes {
  std::vector<NamedTensor> tensors;
  std::vector<WriteItem> boxes;  // in these tensors
  std::uint64_t bytes = 0;
};

/// The memory is reused between copies: the largest cost of a first copy is that the pages are new. Huge pages are used
/// if the system gives any. Copies bypass the CPU caches.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  ~StagingBuffer();
  StagingBuffer(StagingBuffer&&) = delete;

  /// Allocates the memory for such a copy, and its pages, now.
  void reserve(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes);
  /// ENSURES: the result of the previous copy() is overwritten.
  StagedBoxes copy(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes);

 private:
  void grow(std::uint64_t bytes);
  void free_memory();

  std::byte* memory_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace phalanx
