// Whether the ranks of a tensor group split embedding and output by ids. Knows no tensor.
//
// Of most families they must (LlamaConfig::validate_tensor_parallel). GPT-2's 50257 ids have no small divisor: where
// the ranks do not divide them, each has both matrices whole, and their gradients are the same on all.
#pragma once

#include <cstdint>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

inline bool splits_vocabulary(const LlamaConfig& config, std::int64_t ranks) {
  return !config.is_gpt2() || config.vocab_size % ranks == 0;
}

}  // namespace phalanx::models
