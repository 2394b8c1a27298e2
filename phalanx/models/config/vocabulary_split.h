// Whether the ranks of a tensor-parallel group split embedding and output by ids. Torch-free.
//
// In most families they must (LlamaConfig::validate_tensor_parallel). GPT-2's 50257 ids have no small divisor. If the
// number of ranks does not divide them, each rank has both matrices whole, and their gradients are the same on all
// ranks.
#pragma once

#include <cstdint>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

inline bool splits_vocabulary(const LlamaConfig& config, std::int64_t ranks) {
  return !config.is_gpt2() || config.vocab_size % ranks == 0;
}

}  // namespace phalanx::models
