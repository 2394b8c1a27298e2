// Chooses which layers of a model, or of a part of one, recompute their activations in the backward pass.
#pragma once

#include "phalanx/config/config.h"
#include "phalanx/models/llama.h"

namespace phalanx::train {

/// Follows [activation_checkpoint], by the layers' numbers in the full model.
void recompute_layers(models::Llama& model, const config::TrainConfig& config);

}  // namespace phalanx::train
