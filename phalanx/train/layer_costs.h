// How long the parts of a model take on this machine, to cut it into pipeline stages by (models/config/llama_part.h).
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::train {

/// Seconds of a forward and a backward pass of `sequences` through each half-layer, and through the output and loss,
/// last: the least of a few runs on rank 0, while the others wait; so all ranks get the same numbers and cut alike.
/// Half-layers that are built alike are measured once. Collective. It runs one half-layer at a time, with random values
/// of its own, and leaves nothing behind; matrices that tensor parallelism cuts are taken whole.
std::vector<double> measure_layer_costs(const TrainConfig& config, const models::LlamaConfig& model,
                                        std::int64_t sequences, c10::Device device, Communicator& world);

}  // namespace phalanx::train
