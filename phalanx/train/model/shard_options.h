// The options for sharding a run's model, from the configuration.
#pragma once

#include <string>

#include "phalanx/config/config.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace phalanx::train {

/// The module's outputs are in float32 where they are the loss or no other module's input.
FullyShardOptions shard_options(const config::TrainConfig& config);

/// "ZeRO-3 (gathered until the backward pass)"
std::string sharding_text(const config::TrainConfig& config);

}  // namespace phalanx::train
