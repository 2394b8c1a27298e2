// Finds the parameters of a model in Hugging Face's files, for load_weights().
//
//   load_weights("gpt2", nn::named_parameters(*model), hf_weights(model->config()));
#pragma once

#include "phalanx/checkpoint/weights.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx {

LoadWeightsOptions hf_weights(const models::LlamaConfig& config);

/// The same for a caller with a part of the model's parameters, such as a pipeline stage. The others are not read.
LoadWeightsOptions hf_weights_of_part(const models::LlamaConfig& config);

}  // namespace phalanx
