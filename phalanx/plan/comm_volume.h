// How many bytes one rank sends in a training step, intra-node and inter-node. Layouts are ordered by it.
//
// Collectives are counted as rings do them, for a buffer of V bytes over n ranks: an all-gather or reduce-scatter sends
// (n - 1) / n V, an all-reduce twice that. A group of g ranks on each of m nodes is counted on two levels:
// (g - 1) / g V intra-node and (m - 1) / m V / g inter-node. In a step:
//
//   data parallelism   gradients all-reduced once
//   ZeRO-1, ZeRO-2     gradients reduce-scattered and weights all-gathered once: the same volume
//   ZeRO-3             gradients reduce-scattered once, weights all-gathered in each batch's forward and backward pass
//   HSDP               in addition, a shard's gradients all-reduced over the replicas
//   tensor             eight all-gathers or reduce-scatters of the hidden states per block and pass, twelve if the
//                      block is recomputed
//   pipeline           hidden states and their gradient, once per stage boundary and micro-batch
//
//   const StepCommVolume sent = predict_comm_volume(apply_layout(base, layout), layout, /*per_node=*/8);
#pragma once

#include <cstdint>

#include "phalanx/plan/layout.h"

namespace phalanx::plan {

/// One inter-node byte counts as this many intra-node bytes: about the ratio of NVLink to a 400 Gbit/s adapter.
inline constexpr std::int64_t kInterNodeCost = 8;

struct StepCommVolume {
  std::int64_t intra_node = 0;
  std::int64_t inter_node = 0;
  std::int64_t weighted() const noexcept { return intra_node + kInterNodeCost * inter_node; }
  std::int64_t total() const noexcept { return intra_node + inter_node; }
};

/// `shape`: apply_layout() of the layout. `per_node`: consecutive ranks on one node.
StepCommVolume predict_comm_volume(const TrainingShape& shape, const Layout& layout, std::int64_t per_node);

}  // namespace phalanx::plan
