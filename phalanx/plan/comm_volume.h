// How many bytes one rank sends in a step of training, inside its machine and to others: what layouts are ordered by.
//
// Collectives are counted as rings do them, of a buffer of V bytes over n ranks: gathering or scattering (n - 1) / n V,
// all-reducing twice that. A group of g ranks on each of m machines is counted on two levels: (g - 1) / g V inside and
// (m - 1) / m V / g across. Of a step:
//
//   data parallelism   gradients all-reduced once
//   ZeRO-1, ZeRO-2     gradients scattered and weights gathered once: as much
//   ZeRO-3             gradients scattered once, weights gathered in the forward and in the backward pass of each batch
//   HSDP               of a shard, gradients all-reduced over the copies besides
//   tensor             eight gathers or scatters of the hidden states a block and pass, twelve where it is recomputed
//   pipeline           hidden states and their gradient, once a stage boundary and micro-batch
//
//   const Exchange sent = predict_comm_volume(apply_layout(base, layout), layout, /*per_node=*/8);
#pragma once

#include <cstdint>

#include "phalanx/plan/layout.h"

namespace phalanx::plan {

/// A byte to another machine counts as so many within one: about what NVLink has over a 400 Gbit/s adapter.
inline constexpr std::int64_t kInterNodeCost = 8;

struct StepCommVolume {
  std::int64_t intra_node = 0;
  std::int64_t inter_node = 0;
  std::int64_t weighted() const noexcept { return intra_node + kInterNodeCost * inter_node; }
  std::int64_t total() const noexcept { return intra_node + inter_node; }
};

/// `shape`: apply_layout() by the layout. `per_node`: neighbouring ranks on one machine.
StepCommVolume predict_comm_volume(const TrainingShape& shape, const Layout& layout, std::int64_t per_node);

}  // namespace phalanx::plan
