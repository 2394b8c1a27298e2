// Builds the model of a training run, or a part of it, and says which of its parameters are trained: all but those that
// [training] frozen names, or with [lora] its adapters alone. Frozen parameters have requires_grad = false. They have
// no gradient, no optimizer state and no part in the gradient norm, in every layout. Checkpoints and exports hold them
// as they hold the others. [lora] base_dtype says in which type the frozen weights under adapters are stored.
//
//   auto model = build_model(config, config::model_config(config), {.without_memory = true});
//   auto stage = build_model(config, model->config(), part, {.without_memory = true});
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "phalanx/config/config.h"
#include "phalanx/models/llama.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

/// Parameters hold no values yet, as those of models::Llama. ConfigError as of frozen_parameters().
std::shared_ptr<models::Llama> build_model(const config::TrainConfig& config, const models::LlamaConfig& shape,
                                           const models::LlamaPart& part, nn::TensorOptionsOfModule tensor);
std::shared_ptr<models::Llama> build_model(const config::TrainConfig& config, const models::LlamaConfig& shape,
                                           nn::TensorOptionsOfModule tensor);

/// The names of the parameters that a run does not train (models/config/frozen_parameters.h).
std::vector<std::string> frozen_parameters(const config::TrainConfig& config, const models::LlamaConfig& shape);

/// Those of `tensors` that are trained.
std::vector<NamedTensor> without(const std::vector<std::string>& frozen, const std::vector<NamedTensor>& tensors);

/// The patterns, of the key `what`, without those that match `others` alone: parameters that an optimizer does not
/// know, because they are frozen or another optimizer's. ConfigError for a pattern that matches none of both.
std::vector<std::string> patterns_that_match(const std::vector<NamedTensor>& parameters, const std::string& what,
                                             const std::vector<std::string>& patterns,
                                             const std::vector<std::string>& others);

}  // namespace phalanx::train
