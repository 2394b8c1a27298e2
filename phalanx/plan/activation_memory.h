// What the forward pass of a Llama keeps for its backward pass, and what either needs for a moment. See memory_model.h.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

struct ActivationBytes {
  std::int64_t input = 0;          // of a block: all that one that is computed again keeps,
  std::int64_t kept = 0;           // unless it keeps what is costly as well
  std::int64_t block = 0;          // what any other keeps
  std::int64_t backward = 0;       // beside that, in a block's backward pass
  std::int64_t loss = 0;           // of the last norm, the output layer and the loss
  std::int64_t loss_backward = 0;  // in their backward pass
  std::int64_t always = 0;
};

ActivationBytes activation_sizes(const TrainingShape& shape);
bool is_recomputed(const TrainingShape& shape, std::int64_t block);

/// What is there at the loss, then in the backward pass of the last block, of the one before it, ..., of the first.
std::vector<std::int64_t> activations_by_moment(const TrainingShape& shape);

}  // namespace phalanx::plan
