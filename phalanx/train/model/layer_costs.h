// Measures how long the parts of a model take on this node, to cut it into pipeline stages
// (models/config/llama_part.h).
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::train {

/// Returns seconds of a forward and a backward pass of `sequences` through each half-layer; the last entry is the
/// output and the loss. Each is the least of a few runs on rank 0, while the other ranks wait. So all ranks get the
/// same numbers and cut the model alike. Half-layers that are built alike are measured once.
/// Collective. It runs one half-layer at a time, with its own random values, and leaves nothing behind. Matrices that
/// tensor parallelism would cut are measured whole.
std::vector<double> measure_layer_costs(const config::TrainConfig& config, const models::LlamaConfig& model,
                                        std::int64_t sequences, c10::Device device, Communicator& world);

}  // namespace phalanx::train
