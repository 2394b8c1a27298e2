// Plans which collectives convert a tensor from one placement to another. Torch-free; needs no communicator.
//
// The steps follow from the two specs alone. So every rank computes the same plan, and logs, tests and a planner can
// read it without a running job. redistribute.h executes it.
//
//   slice           replicated -> split: each rank cuts its part out; nothing moves
//   addend          replicated or split -> partial: zeros where another rank has the value; nothing moves
//   all_gather      split -> replicated
//   reduce_scatter  partial -> split
//   all_reduce      partial -> replicated
//   all_to_all      split -> split, along one axis (another dimension, other boundaries, or split along other axes from
//                   now on), or over the whole mesh (another nesting): each element goes once to each rank that needs
//                   it
//
// The plan is the sequence with the smallest cost. Cost is the number of bytes that move, plus 64 KiB per rank for each
// collective (128 KiB if it spans the mesh), about what a collective's latency is worth. An all_to_all packs its data
// for each receiver, so its bytes count 5/4, or 3/2 over the whole mesh. So small tensors take few steps, large ones
// the steps that move least. If the mesh has no communicator of its own (a sub-mesh of several axes), a changed nesting
// gathers the dimensions that are nested differently.
//
//   const auto plan = plan_redistribute(from, to);
//   plan.text();     // 'w' float32[8, 6] on (dp=2, tp=2): dp:S(0) -> tp:S(1): 192 B over all ranks
//                    //   1. slice: dp:S(0) -> dp:S(0), tp:S(1)
//                    //   2. all_gather over dp: dp:S(0), tp:S(1) -> tp:S(1), 192 B
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/tensor/shard_spec.h"

namespace phalanx {

struct RedistributeStep {
  enum class Kind : std::uint8_t { slice, addend, all_gather, reduce_scatter, all_reduce, all_to_all };
  Kind kind = Kind::slice;
  std::string axis;  // its communicator is used; empty: none (slice, addend), or all_to_all over the whole mesh
  ShardSpec before;
  ShardSpec after;
  /// Bytes that cross between ranks, summed over all ranks. A reduction counts as its best algorithm does:
  /// reduce_scatter (n - 1) times the input, all_reduce twice that.
  std::int64_t bytes = 0;
  std::string text() const;
};

std::string_view name_of(RedistributeStep::Kind kind);  // "all_gather", ...

struct RedistributePlan {
  ShardSpec from;
  ShardSpec to;
  std::vector<RedistributeStep> steps;  // empty if nothing has to change
  std::int64_t bytes() const;
  std::string text() const;
};

struct RedistributePlanOptions {
  bool whole_mesh = true;  // whether one communicator spans the mesh: the world's, or that of a single axis
};

/// REQUIRES: the specs agree in shape, dtype and mesh (ConfigError otherwise).
RedistributePlan plan_redistribute(const ShardSpec& from, const ShardSpec& to, RedistributePlanOptions options = {});

}  // namespace phalanx
