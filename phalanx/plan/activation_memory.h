// What the forward pass of a Llama keeps for its backward pass, and what either needs for a moment. See memory_model.h.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

struct ActivationBytes {
  std::int64_t input = 0;      // of a block: all that one that is computed again keeps,
  std::int64_t saved = 0;      // unless it keeps what is costly as well
  std::int64_t attention = 0;  // what the halves of any other keep
  std::int64_t feed_forward = 0;
  std::int64_t forward = 0;        // beside that, in a block's forward pass,
  std::int64_t backward = 0;       // and in its backward pass
  std::int64_t loss = 0;           // of the last norm, the output layer and the loss
  std::int64_t loss_backward = 0;  // in their backward pass
  std::int64_t head = 0;           // of them, what is kept for a backward pass that comes later
  std::int64_t always = 0;
  // Where weights' gradients are left for later: what these need.
  std::int64_t attention_deferred = 0, feed_forward_deferred = 0, head_deferred = 0;
  std::int64_t backward_input = 0;  // beside that, while they are left

  std::int64_t block() const noexcept { return attention + feed_forward; }
};

ActivationBytes activation_sizes(const TrainingShape& shape);
bool is_recomputed(const TrainingShape& shape, std::int64_t block);

/// What is there at the loss, then in the backward pass of the last block, of the one before it, ..., of the first.
std::vector<std::int64_t> activation_memory_timeline(const TrainingShape& shape);

}  // namespace phalanx::plan
