// A cost model that chooses what attention exchanges under context parallelism. It does not use torch.
//
// It counts the bytes that a rank sends for one layer in a step, and of the ring's transfers, which run while attention
// is computed, only those that this does not hide. The exchange with the fewest bytes left wins. Links are those of one
// node, or of several if the ranks of context and tensor parallelism are more than a node usually has. Devices are
// thought to be GPUs: CPUs compute more slowly for the speed of their links, so more is hidden there. With packed
// documents only exchanges that give all ranks the same work are compared, if there are any.
//
//   const ContextExchangeChoice choice = choose_context_exchange({.model = model, .cp = 4, .seq = 8192});
//   choice.name;      // "ring"
//   choice.reason;    // says what a rank would send in a layer and step with each
#pragma once

#include <cstdint>
#include <string>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::plan {

struct ContextWork {
  models::LlamaConfig model;
  std::int64_t cp = 2, tp = 1;
  std::int64_t batch = 1, seq = 1;  // of one forward pass
  std::int64_t number_bytes = 2;    // of a key or value; gradients are summed in float32
  bool has_documents = false;       // packed: attention is thought to cost a quarter
  bool balances_keys = false;       // where keys are exchanged, packed sequences are cut by work (layout/packed_cut.h)
};

struct ContextExchangeChoice {
  std::string name;    // "keys", "heads" or "ring"
  std::string reason;  // one line; empty: it was asked for
};

ContextExchangeChoice choose_context_exchange(const ContextWork& work);

/// 0 where a layer sees all positions.
std::int64_t window_of_all_layers(const models::LlamaConfig& model);

/// How many pieces of keys and values the ranks of a ring send together, of 2 * cp pieces
/// (parallel/context). `window` 0: none.
std::int64_t ring_transfers(std::int64_t cp, std::int64_t seq, std::int64_t window);

}  // namespace phalanx::plan
