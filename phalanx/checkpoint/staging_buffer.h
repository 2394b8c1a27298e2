// A copy of what a rank is about to write, so that training may go on while it is written.
//
//   auto staged = buffer.copy(state.tensors, plan_save(...));
//   write_shard_file(fs, path, staged.tensors, staged.boxes);      // on another thread, until the next copy()
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phalanx/checkpoint/save_plan.h"

namespace phalanx {

/// The boxes alone, each a tensor in host memory.
struct StagedBoxes {
  std::vector<NamedTensor> tensors;
  std::vector<WriteItem> boxes;  // in these tensors
  std::uint64_t bytes = 0;
};

/// The memory is kept between copies: what costs most in a first copy is that the pages are new. They are huge ones
/// where the machine gives any, and written past the caches.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  ~StagingBuffer();
  StagingBuffer(StagingBuffer&&) = delete;

  /// Makes the memory for such a copy and its pages now.
  void reserve(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes);
  /// What it returned before is overwritten.
  StagedBoxes copy(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes);

 private:
  void grow(std::uint64_t bytes);
  void free_memory();

  std::byte* memory_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace phalanx
