// ParallelPlan: how the ranks of a run divide a model and its batch. It uses no tensor and no communicator.
//
// Ranks are numbered over the axes pp, dp_replicate, dp_shard, cp, tp, with the last one innermost. So the ranks of a
// tensor-parallel group are neighbours (on one node), and pipeline stages are furthest apart.
//
//   pp            the layers are divided into pipeline stages; a rank has some of the layers
//   dp_replicate  replicas of the model, or of its shards, that average their gradients
//   dp_shard      ranks that share one copy (ZeRO); `zero_stage` says what they shard
//   cp            ranks with the same sequences, each with some of their positions (context_cut.h)
//   tp            every large matrix is split over these ranks
//
// Ranks that differ in cp hold the same weights and sum their gradients, as data-parallel ranks do. So the mesh has no
// axis of its own for cp. It is the inner part of the axis that sums gradients: of "dp_shard_cp" if the model is
// sharded, else of "dp_replicate_cp".
//
// Of the ranks that share one copy, each `ep` neighbours divide the experts of a mixture among themselves.
//
// - The caller that makes a plan checks it before anything is allocated or sent. check() throws a ConfigError with the
//   equation, the numbers and the nearest valid choices. `names` says what the settings are called in the error.
// - Every rank makes the same plan by itself, from the same configuration.
//
//   const ParallelPlan plan{.dp_shard = 2, .tp = 2};
//   const ModelDimensions model{
//       .n_layers = 4, .n_heads = 8, .n_kv_heads = 2, .ffn_hidden = 688, .vocab_size = 4096, .seq_len = 256};
//   check(plan, model, /*ranks=*/4);
//   DeviceMesh mesh(world, plan.axes());  // (dp_shard=2, tp=2)
//   plan.text();                          // "dp_shard=2 (ZeRO-3) x tp=2 (sequence parallel)"
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/layout/context_cut.h"
#include "phalanx/layout/mesh_shape.h"

namespace phalanx {

struct ParallelPlan {
  std::int64_t pp = 1;
  std::int64_t dp_replicate = 1;
  std::int64_t dp_shard = 1;
  std::int64_t cp = 1;
  std::int64_t tp = 1;
  bool shards_over_cp = false;    // with cp above 1: a model is sharded over the ranks of cp though dp_shard is 1
  int zero_stage = 3;             // of a sharded model
  bool sequence_parallel = true;  // with tp above 1: between the matrices of a block each rank has some of the tokens
  std::int64_t ep = 1;            // divides shards()

  std::int64_t ranks() const noexcept { return pp * dp_replicate * dp_shard * cp * tp; }
  /// The number of ranks, or groups of ranks, that have different batches.
  std::int64_t data_parallel_size() const noexcept { return dp_replicate * dp_shard; }
  /// The index of that rank or group for `rank`.
  std::int64_t data_parallel_rank(std::int64_t rank) const noexcept { return rank / (tp * cp) % data_parallel_size(); }
  /// The index of `rank` among the ranks that share its sequences.
  std::int64_t context_parallel_rank(std::int64_t rank) const noexcept { return rank / tp % cp; }
  /// The number of ranks, or groups of ranks, whose losses add up to that of the global batch.
  std::int64_t loss_parts() const noexcept { return data_parallel_size() * cp; }

  bool is_sharded() const noexcept { return dp_shard > 1 || (cp > 1 && shards_over_cp); }
  /// The ranks among which one copy of the model, or of a stage's part of it, is sharded; 1: it is not.
  std::int64_t shards() const noexcept { return is_sharded() ? dp_shard * cp : 1; }
  /// The copies of the model or of its shards.
  std::int64_t replicas() const noexcept { return is_sharded() ? dp_replicate : dp_replicate * cp; }
  /// The name of the axis of the replicas.
  const char* replica_axis() const noexcept { return !is_sharded() && cp > 1 ? "dp_replicate_cp" : "dp_replicate"; }
  /// The name of the axis of the ranks that shard the model.
  const char* shard_axis() const noexcept { return cp > 1 ? "dp_shard_cp" : "dp_shard"; }
  /// How `rank` of the world cuts sequences.
  ContextCut context_cut(std::int64_t rank) const noexcept {
    return {.ranks = cp, .rank = context_parallel_rank(rank), .multiple = positions_multiple(tp, sequence_parallel)};
  }
  bool uses_model_parallelism() const noexcept { return pp > 1 || tp > 1; }
  /// The axes with more than one rank, outermost first. Never empty: one rank is (dp_shard=1).
  std::vector<MeshAxis> axes() const;
  std::string text() const;

  bool operator==(const ParallelPlan&) const = default;
};

/// The dimensions of a transformer that the degrees of a plan must divide.
struct ModelDimensions {
  std::int64_t n_layers = 0;
  std::int64_t n_heads = 0;
  std::int64_t n_kv_heads = 0;
  std::int64_t ffn_hidden = 0;
  std::int64_t vocab_size = 0;
  std::int64_t seq_len = 0;
  std::int64_t experts = 0;       // of a layer; 0: there are none
  std::int64_t dense_hidden = 0;  // of layers without experts in a model with them; 0: there are none
};

/// The names of a plan's settings in the user's configuration or command line.
struct PlanNames {
  std::string tp = "tp";
  std::string pp = "pp";
  std::string ep = "ep";
  std::string cp = "cp";
  std::string sequence_parallel = "sequence_parallel";
};

/// Throws ConfigError if the product of the degrees is not `ranks`, or if they do not divide the model's dimensions.
void check(const ParallelPlan& plan, const ModelDimensions& model, std::int64_t ranks, const PlanNames& names = {});

}  // namespace phalanx
