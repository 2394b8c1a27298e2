// Decides which of three scenarios a model and devices are:
//
//   1  the whole model trains on every device: data parallelism, with or without sharded optimizer state (ZeRO)
//   2  it fits only on the largest device, or on none, but each layer does: pipeline, sharding, tensor parallelism
//   3  one layer does not fit: tensor parallelism
//
// "The whole model" includes its gradients, the optimizer's state and the activations of one sequence, recomputed if
// necessary, as on one data-parallel rank. "One layer" is its weights in use, their gradients and the activations of
// one sequence, all of which sharding brings to one device at once. The layer is a block, or the embedding, or the
// output with the loss, whichever needs most. It does not use torch.
//
//   const Scenario scenario = find_scenario(base, devices, /*headroom=*/0.05);
//   fmt::print("scenario {}: {}\n", scenario.number, scenario.reason);
#pragma once

#include <cstdint>
#include <string>

#include "phalanx/plan/devices.h"
#include "phalanx/plan/memory_model.h"

namespace phalanx::plan {

struct LayerNeed {
  std::string name;                                          // "block", "embedding", "output and loss"
  std::int64_t parameters = 0;                               // number of parameters
  std::int64_t weights = 0, gradients = 0, activations = 0;  // bytes
  std::int64_t optimizer = 0;                                // bytes; not needed at the same time
  std::int64_t total() const noexcept { return weights + gradients + activations; }
};

struct Scenario {
  int number = 1;
  std::string reason;                      // one sentence with the bytes
  std::string methods;                     // "data parallelism, ZeRO"
  TrainingMemory whole, whole_recomputed;  // of one sequence at a time on one device
  LayerNeed layer;                         // the layer that needs most
};

/// The part of a device's memory that a plan may use: all except the share `headroom`, which an allocator leaves
/// unused.
std::int64_t usable(std::int64_t bytes, double headroom);

Scenario find_scenario(const TrainingShape& base, const Devices& devices, double headroom);

}  // namespace phalanx::plan
