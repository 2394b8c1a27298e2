// LlamaPart: which part of a Llama a pipeline stage holds. Torch-free.
//
// A model of n layers is a sequence of 2n half-layers: 2i is the attention of layer i and 2i + 1 its feed-forward net,
// each with its norm. A part is a range of them. The first part also holds the embedding (and learnt positions), the
// last one the final norm and the output. If embedding and output share one matrix, both parts have it, under the one
// name tok_embeddings.weight.
//
//   for (const LlamaPart& part : divide_llama(config, {1.5, 2.5})) ...          // layers of each stage
//   std::vector<LlamaPart> parts = balance_llama(config, /*stages=*/4, /*seq=*/1024);
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

struct LlamaPart {
  std::int64_t begin = 0;  // half-layers [begin, end)
  std::int64_t end = 0;
  bool embedding = false;  // its input is tokens, not hidden states
  bool head = false;       // norm and output

  bool is_whole(const LlamaConfig& config) const noexcept {
    return embedding && head && begin == 0 && end == 2 * config.n_layers;
  }
  std::string text() const;  // "embedding, layers 0 to 1.5"
  bool operator==(const LlamaPart&) const = default;
};

LlamaPart full_llama(const LlamaConfig& config);

/// Divides by the number of layers of each stage, in steps of one half. Zero means a stage with only the embedding or
/// only the output: only the first and the last stage may be zero. Throws ConfigError unless the numbers add up to
/// n_layers.
std::vector<LlamaPart> divide_llama(const LlamaConfig& config, const std::vector<double>& layers);

/// The work of each half-layer on a sequence of this length, in multiply-adds per token, and of the output, last.
std::vector<double> llama_costs(const LlamaConfig& config, std::int64_t seq);

/// Minimises the largest sum of costs of a stage. `costs` holds measured costs, one per half-layer and one for the
/// output. Without it, llama_costs() are used. Throws ConfigError for more stages than half-layers.
std::vector<LlamaPart> balance_llama(const LlamaConfig& config, int stages, const std::vector<double>& costs);
std::vector<LlamaPart> balance_llama(const LlamaConfig& config, int stages, std::int64_t seq);

}  // namespace phalanx::models
