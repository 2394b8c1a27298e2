// The tensor- and sequence-parallel plan of Llama.
//
//   Llama model(config, {.without_memory = true});
//   parallelize_llama(model, mesh, {.sequence_parallel = true});    // mesh: DeviceMesh with an axis "tp"
//   nn::initialise(model, seed);                                    // or FullyShardedDataParallel(model, mesh), ...
//   model.loss(tokens, labels).backward();                          // the whole sequences on every rank of the group
//
// Queries, keys, values, gate and up are split by rows (heads, hidden units), wo and w2 by columns; input and output
// embedding by ids, with a loss that never gathers logits (parallel/tensor/vocab_parallel.h). Key and value heads
// that are fewer than the ranks are held by several.
//   sequence_parallel: between these layers each rank has a part of the positions, [batch, seq / ranks, dim]. Norms and
//     residuals are computed once, an all-gather stands in front of attention and feed-forward, a reduce-scatter
//     behind. Sequences must be multiples of the ranks. For training.
//   otherwise each rank has all of it, and an all-reduce stands behind. Any length; inference with a cache needs this
//     form: model.make_cache() is of this rank's heads, logits are whole on every rank.
// A part of a model (LlamaPart) does as well; what goes from part to part then is such a part of the positions, too.
//
// Contract: as parallelize_module() of parallel/tensor/styles.h, before FullyShardedDataParallel or
// DistributedDataParallel is made of the model and before nn::initialise(). Tokens and labels are the same on all ranks
// of the group. What the ranks do not divide is a ConfigError before anything is allocated or sent.
#pragma once

#include <vector>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/parallel/tensor/styles.h"

namespace phalanx::models {

struct LlamaParallelOptions {
  bool sequence_parallel = true;
  /// Along which dimension activations are split between the layers: 1, by positions; 0, by sequences, which moves no
  /// element within a rank, but batches must be multiples of the ranks.
  int split_dim = 1;
  /// Under sequence parallelism: attention and feed-forward multiply piece by piece while activations and gradients are
  /// on their way (parallel/tensor/overlapped_layers.h). Otherwise before and after; the sums are the same.
  bool overlap = true;
  std::int64_t seq_len = 0;  // of the sequences to come, checked ahead of time where they are split; 0: not known
};

void parallelize_llama(Llama& model, const DeviceMesh& mesh, const LlamaParallelOptions& options = {});

/// The plan itself, for parallelize_module(): all but the output layer's collectives.
/// `between`: how activations lie between the layers, replicated or split; `overlap`: only where they are split.
std::vector<ParallelStyle> llama_tensor_plan(const Llama& model, int ranks, const ActivationLayout& between,
                                             bool overlap = false);

}  // namespace phalanx::models
