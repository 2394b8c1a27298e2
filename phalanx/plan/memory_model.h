// Predicts how much memory a rank needs to train a Llama, from the dimensions of the model and the layout, before
// anything is allocated. benchmarks/results/memory.md compares it with measurements. It does not use torch.
//
// State (P parameters, N ranks that share a copy of the model, AdamW in float32): 16 P bytes without sharding,
// 8 P + 8 P / N under ZeRO-1, 4 P + 12 P / N under ZeRO-2, 16 P / N under ZeRO-3, plus the cost of rows that cannot be
// cut (layout/flat_layout.h, which also computes the real layout).
//
// Activations are those at the moment of the peak: what the blocks save for the backward pass, and what the loss or a
// block's backward pass needs in addition. The counts follow the kernels: the fused ones of the CPU in float32, those
// of GPUs, or ATen's operators.
//
//   const TrainingMemory memory = predict_memory({.model = config, .batch = 8, .seq = 2048, .shards = 4});
//   log::info(memory.peak.text());
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/llama_part.h"
#include "phalanx/models/config/lora_config.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/schedule/schedule.h"

namespace phalanx::plan {

inline constexpr std::int64_t kFloatBytes = 4;  // of a float32
// The first bucket of DistributedDataParallel. Gradients that fit into it stay as they are.
inline constexpr std::int64_t kFirstBucket = 1 << 20;

/// The stages of a pipeline.
struct PipelineShape {
  schedule::Schedule schedule;
  std::vector<models::LlamaPart> parts;  // by stage
};

/// Everything that decides how much memory a rank needs.
struct TrainingShape {
  models::LlamaConfig model;
  std::int64_t batch = 1;  // sequences in one forward pass; in a pipeline, of a micro-batch
  std::int64_t seq = 1;
  std::int64_t global_batch = 0;  // sequences of all ranks in one step; 0: one forward pass of each
  // Sequences in a forward pass without a backward pass: of validation, or of the reference of preferences.
  // -1: `batch`; 0: there is no such pass. A pipeline has one micro-batch of them.
  std::int64_t validation_batch = 0;
  bool accumulates = false;             // gradients of several forward passes are accumulated
  bool reduces_each_microbatch = true;  // ZeRO-2, -3: only its rows accumulate; else full ones, until the last

  std::int64_t tensor_parallel_size = 1;   // over which every large matrix is cut
  bool sequence_parallel = true;           // between these matrices each rank has some of the tokens
  std::int64_t context_parallel_size = 1;  // over which every sequence is cut
  bool gathers_keys = true;                // keys and values of a whole sequence are on each of these ranks
  bool exchanges_heads = false;            // all-to-all; neither: around a ring
  std::optional<PipelineShape> pipeline;

  std::int64_t replicas = 1;              // of the model, or of its shards
  std::int64_t shards = 1;                // 1: each rank has the whole model
  std::int64_t expert_parallel_size = 1;  // over which experts are divided; it divides `shards`
  int zero_stage = 3;
  bool reshard_after_forward = true;
  std::int64_t reshard_group = 0;  // stage 3: ranks over which units are sharded between the passes; 0: not set
  bool offload = false;            // shards, their gradients and the optimizer's state are on the host

  std::vector<std::string> frozen;  // names of parameters that are not trained: no gradient, no optimizer state
  models::LoraOptions lora;         // with a rank: adapters, and all other parameters are frozen

  std::int64_t recompute_every = 0;   // one of this many blocks saves only its input; 0: no block
  bool uses_op_sac = false;           // that block also saves what op_sac_policy selects (activation_checkpoint.h)
  std::int64_t optimizer_copies = 2;  // numbers per parameter: AdamW 2, SGD with momentum 1
  std::optional<std::int64_t> matrix_copies;  // of matrices inside of blocks: Muon 1; unset: as the others
  std::vector<std::string> adamw_params;      // patterns of matrices that count as others
  std::int64_t narrow_copies = 0;             // of the copies, those in 16 bits: AdamW's moments, if they are bfloat16
  std::int64_t weight_bytes = 4;              // per parameter
  bool master_weights = true;                 // if weight_bytes is 2, the optimizer has a float32 copy
  std::int64_t gather_bytes = 4;              // of a parameter in use
  std::int64_t reduce_bytes = 4;              // of a gradient
  bool autocast = false;                      // matrix products in 16 bits
  bool on_device = false;                     // a GPU's memory; else the host's
  bool over_nccl = false;                     // there, and NCCL's buffers count (nccl_memory.h)

  bool shares_memory = false;      // ranks are processes of one node, over shm: see TrainingMemory
  bool resumes = false;            // from a checkpoint
  bool async_checkpoint = false;   // asynchronous checkpoints
  bool exports_at_end = false;     // the full model on rank 0, after training
  std::int64_t thread_stacks = 0;  // of the intra-op pool, in bytes of address space
  /// Positions of a sequence that a rank of context parallelism has.
  std::int64_t local_seq() const noexcept;
  /// The ranks that share the experts that this one has.
  std::int64_t shards_of_experts() const noexcept { return shards / expert_parallel_size; }
  /// The ranks that have the same part of the model, or shards of it.
  std::int64_t ranks() const noexcept { return replicas * shards; }
  /// Whether a float32 master lies beside each 16-bit weight.
  bool has_masters() const noexcept { return weight_bytes < kFloatBytes && master_weights; }
  /// Whether the optimizer rounds what it has stepped in float32.
  bool rounds_state() const noexcept { return narrow_copies > 0 || (weight_bytes < kFloatBytes && !master_weights); }
  /// Bytes of a frozen parameter as it is stored, and in use.
  std::int64_t frozen_bytes() const noexcept { return has_narrow_base() ? 2 : weight_bytes; }
  std::int64_t frozen_gather_bytes() const noexcept { return has_narrow_base() ? 2 : gather_bytes; }
  bool has_narrow_base() const noexcept { return lora.has_narrow_base(); }
  /// Whether products under autocast use 16-bit copies of the weights: a narrow base is used as it is stored.
  bool copies_weights() const noexcept { return autocast && !has_narrow_base(); }
  bool trains_a_part() const noexcept { return lora.rank > 0 || !frozen.empty(); }
  bool uses_model_parallelism() const noexcept { return tensor_parallel_size > 1 || pipeline; }
  /// Whether passes accumulate only this rank's rows of a sharded model's gradients.
  bool accumulates_sharded_gradients() const noexcept {
    return accumulates && reduces_each_microbatch && shards > 1 && zero_stage > 1 && !pipeline;
  }
};

struct TrainingMemory {
  /// At the moment of the peak. `peak.shared`: the part of it in windows that the ranks share (buckets, shards,
  /// unsharded units).
  observe::MemoryCounts peak;
  /// Outside of tensors: the heap's rounding and gaps, threads, libraries' own buffers allocated from now on.
  std::int64_t runtime = 0;
  /// The part of total() that only rank 0 needs: the export gathers the full model there.
  std::int64_t first_rank_only = 0;
  /// Stacks of threads: mapped completely, hardly used. RLIMIT_DATA and RLIMIT_AS count them.
  std::int64_t thread_stacks = 0;
  /// The other ranks' parts of the shared windows, which are mapped too.
  std::int64_t mapped = 0;
  /// In a run on devices: memory of the host, in addition to all of the above.
  std::int64_t on_host = 0;
  /// What the buffers are, and the temporary memory beside the state, largest first.
  std::vector<std::pair<std::string, std::int64_t>> buffers;
  double padding = 0;  // elements between the parameters of sharded units, as a share of all parameters

  std::int64_t total() const noexcept { return peak.total() + runtime; }
};

/// For a pipeline: the memory of the rank that needs most.
TrainingMemory predict_memory(const TrainingShape& shape);
/// The memory of one pipeline rank, by its coordinate.
TrainingMemory predict_memory_of_stage_rank(const TrainingShape& shape, std::size_t rank);

}  // namespace phalanx::plan
