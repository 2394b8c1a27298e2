// Which collectives bring a tensor from one placement to another. Knows no torch and no communicator.
//
// The steps follow from the two specs alone, so every rank finds the same ones, and logs, tests and a planner can read
// them without a job. redistribute.h carries them out.
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
// Of all sequences the one with the smallest cost is taken: the bytes that move (those of an all_to_all count 5/4, over
// the whole mesh 3/2, for they are packed for each receiver), plus 64 KiB a rank for each collective (128 KiB where it
// spans the mesh), about what a collective's latency is worth. So small tensors go in few steps, large ones in those
// that move least. Where the mesh has no communicator of its own (a sub-mesh of several axes) a changed nesting goes
// through a gather of what is nested otherwise.
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
  std::string axis;  // whose communicator is used; empty: none (slice, addend), or all_to_all over the whole mesh
  ShardSpec before;
  ShardSpec after;
  /// What crosses between ranks, over all ranks together. A reduction counts as its best algorithm does: reduce_scatter
  /// (n - 1) times the input, all_reduce twice that.
  std::int64_t bytes = 0;
  std::string text() const;
};

std::string_view name_of(RedistributeStep::Kind kind);  // "all_gather", ...

struct RedistributePlan {
  ShardSpec from;
  ShardSpec to;
  std::vector<RedistributeStep> steps;  // none where nothing has to change
  std::int64_t bytes() const;
  std::string text() const;
};

struct RedistributePlanOptions {
  bool whole_mesh = true;  // whether one communicator spans the mesh: it is the world's, or has one axis
};

/// The specs must agree in shape, dtype and mesh (ConfigError).
RedistributePlan plan_redistribute(const ShardSpec& from, const ShardSpec& to, RedistributePlanOptions options = {});

}  // namespace phalanx
