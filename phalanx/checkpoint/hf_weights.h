// How the parameters of a model are found in Hugging Face's files, for load_weights().
//
//   load_weights("gpt2", nn::named_parameters(*model), hf_weights(model->config()));
#pragma once

#include "phalanx/checkpoint/weights.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx {

LoadWeightsOptions hf_weights(const models::LlamaConfig& config);

/// The same for whoever has some of the model's parameters, as a stage of a pipeline: the others stay unread.
LoadWeightsOptions hf_weights_of_part(const models::LlamaConfig& config);

}  // namespace phalanx
