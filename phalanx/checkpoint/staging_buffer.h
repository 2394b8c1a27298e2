// StagingBuffer copies what a rank is about to write, so that training can continue while it is written.
//
//   auto staged = buffer.copy(state.tensors, plan_save(state.tensors, local_plans, rank));
//   staged.await_copies();                                         // on another thread
//   write_shard_file(fs, path, staged.tensors, staged.boxes);      // there, until the next copy()
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "phalanx/checkpoint/save_plan.h"
#include "phalanx/tensor/copy_stream.h"

namespace phalanx {

/// Only the boxes, each a tensor in host memory.
struct StagedBoxes {
  std::vector<NamedTensor> tensors;
  std::vector<WriteItem> boxes;  // in these tensors
  std::uint64_t bytes = 0;
  std::vector<CopyStream::Mark> copied;  // one for each device; what came from there may be read when they are done

  /// The host waits for all of these. Throws CheckpointError if a device has failed.
  void await_copies() const;
};

/// The memory is reused between copies: the largest cost of a first copy is that the pages are new. Huge pages are used
/// if the system gives any. Copies bypass the CPU caches. What comes from a device goes to pinned memory, in blocks of
/// a power of two bytes, as its allocator gives them: up to twice the bytes that are copied.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  ~StagingBuffer();
  StagingBuffer(StagingBuffer&&) = delete;

  /// Allocates the memory for such a copy, and its pages, now.
  void reserve(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes);
  /// Copies from a device are queued on its current stream, and the host does not wait for them. So what that stream
  /// does next with the tensors does not change the copy.
  /// ENSURES: the result of the previous copy() is overwritten.
  StagedBoxes copy(const std::vector<NamedTensor>& tensors, const std::vector<WriteItem>& boxes);

 private:
  void grow(std::uint64_t bytes);
  void free_memory();
  void make_pinned(const std::vector<std::int64_t>& blocks);

  std::byte* memory_ = nullptr;
  std::uint64_t size_ = 0;
  std::vector<at::Tensor> pinned_;  // blocks of bytes
};

}  // namespace phalanx
