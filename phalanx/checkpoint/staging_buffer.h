// A copy of what a rank is about to write, so that training may go on while it is written.
//
//   auto staged = buffer.copy(state.tensors, plan_save(...));
//   write_shard_file(fs, path, staged.tensors, staged.boxes);      // on another thread, until the next copy()
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "phalanx/checkpoint/save_plan.h"

namespace phalanx {

/// The boxes alone, each a tensor in host memory.
struct StagedBoxes {
  std::vector<NamedTensor> tensors;
  std::vector<PlannedBox> boxes;  // in these tensors
  std::uint64_t bytes = 0;
};

/// The memory is kept between copies: what costs most in a first copy is that the pages are new.
class StagingBuffer {
 public:
  /// What it returned before is overwritten.
  StagedBoxes copy(const std::vector<NamedTensor>& tensors, const std::vector<PlannedBox>& boxes);

 private:
  at::Tensor bytes_;
};

}  // namespace phalanx
