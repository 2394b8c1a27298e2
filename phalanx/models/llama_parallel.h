// Tensor and sequence parallelism for Llama.
//
//   models::Llama model(config, {.without_memory = true});
//   parallelize_llama(model, mesh, {.sequence_parallel = true});    // mesh: DeviceMesh with an axis "tp"
//   nn::initialise(model, seed);                                    // or FullyShardedDataParallel(model, mesh), ...
//   model.loss(tokens, labels).backward();                          // the whole sequences on every rank of the group
//
// Queries, keys, values, gate and up are split by rows (heads, hidden units), wo and w2 by columns. Input and output
// embedding are split by ids, with a loss that never gathers logits (parallel/tensor/vocab_parallel.h). If there are
// fewer key and value heads than ranks, several ranks hold the same head.
// - With sequence_parallel, each rank has a part of the positions between these layers: [batch, seq / ranks, dim].
//   Norms and residuals are computed once. An all-gather precedes attention and feed-forward, a reduce-scatter follows
//   them. Sequences must be multiples of the number of ranks. For training.
// - Otherwise each rank has all positions, and an all-reduce follows these layers. Any length. Inference with a cache
//   needs this form: model.make_cache() holds this rank's heads, and logits are whole on every rank.
// A part of a model (LlamaPart) works as well. The activations between parts are then also split by positions.
//
// Contract: as parallelize_module() of parallel/tensor/styles.h. Tokens and labels are the same on all ranks of the
// group. Throws ConfigError, before anything is allocated or sent, if the number of ranks does not divide something.
// REQUIRES: called before nn::initialise(), and before FullyShardedDataParallel or DistributedDataParallel is
// constructed.
#pragma once

#include <vector>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/parallel/tensor/styles.h"

namespace phalanx::models {

struct LlamaParallelOptions {
  bool sequence_parallel = true;
  /// The dimension along which activations are split between the layers: 1, by positions; 0, by sequences. 0 moves no
  /// element within a rank, but batches must be multiples of the number of ranks.
  int split_dim = 1;
  /// Under sequence parallelism: attention and feed-forward multiply chunk by chunk while activations and gradients are
  /// in flight (parallel/tensor/overlapped_layers.h). If false, they multiply before and after the transfers. The sums
  /// are the same.
  bool overlap = true;
  std::int64_t seq_len = 0;  // of future sequences, checked ahead of time if they are split; 0: not known
};

/// Returns what parallelize_module() does.
std::vector<std::shared_ptr<Communicator>> parallelize_llama(Llama& model, const DeviceMesh& mesh,
                                                             const LlamaParallelOptions& options = {});

/// The plan for parallelize_module(): everything but the output layer's collectives. `between` is the layout of the
/// activations between the layers, replicated or split. `overlap` applies only if they are split.
std::vector<ParallelStyle> llama_tensor_plan(const Llama& model, int ranks, const ActivationLayout& between,
                                             bool overlap = false);

}  // namespace phalanx::models
