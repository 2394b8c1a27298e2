// Which layers of a model, or of a part of one, compute their activations again in the backward pass.
#pragma once

#include "phalanx/config/config.h"
#include "phalanx/models/llama.h"

namespace phalanx::train {

/// As [activation_checkpoint] says, by the layers' numbers in the whole model.
void recompute_layers(models::Llama& model, const TrainConfig& config);

}  // namespace phalanx::train
