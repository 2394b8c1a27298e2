// The activations that the forward pass of a Llama saves for its backward pass, and the temporary memory of both. See
// memory_model.h.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

struct ActivationBytes {
  std::int64_t input = 0;      // of a block: the only activation that a recomputed block saves,
  std::int64_t saved = 0;      // unless it also saves the costly ones: those
  std::int64_t attention = 0;  // saved by the two halves of any other block
  std::int64_t feed_forward = 0;
  std::int64_t forward = 0;        // temporary, in a block's forward pass
  std::int64_t backward = 0;       // temporary, in a block's backward pass
  std::int64_t loss = 0;           // of the last norm, the output layer and the loss
  std::int64_t loss_backward = 0;  // in their backward pass
  std::int64_t head = 0;           // the part of `loss` that is saved for a backward pass that comes later
  std::int64_t always = 0;
  // If backward_weight runs later: what it needs.
  std::int64_t attention_deferred = 0, feed_forward_deferred = 0, head_deferred = 0;
  std::int64_t backward_input = 0;  // in addition, while they are deferred

  std::int64_t block() const noexcept { return attention + feed_forward; }
};

ActivationBytes activation_sizes(const TrainingShape& shape);
bool is_recomputed(const TrainingShape& shape, std::int64_t block);

/// The activations at the loss, then in the backward pass of the last block, of the one before it, ..., of the first.
std::vector<std::int64_t> activation_memory_timeline(const TrainingShape& shape);

}  // namespace phalanx::plan
