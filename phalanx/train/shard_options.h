// How a run shards its model, from the configuration.
#pragma once

#include <string>

#include "phalanx/config/config.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace phalanx::train {

/// What the module returns is in float32, where it is the loss or nobody else's input.
FullyShardOptions shard_options(const TrainConfig& config);

/// "ZeRO-3 (gathered until the backward pass)"
std::string sharding_text(const TrainConfig& config);

}  // namespace phalanx::train
