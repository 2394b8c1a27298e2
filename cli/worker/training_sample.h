// The text that a model just trained writes, for the run's report.
#pragma once

#include <string>

#include "phalanx/config/config.h"
#include "phalanx/models/llama.h"

namespace phalanx::cli {

/// Throws DataError if the tokenizer of model.hf_assets_path cannot be read or has more ids than the model: to be known
/// before hours of training.
void check_sample_tokenizer(const train::TrainConfig& config);

/// What the model writes after metrics.sample_prompt, with the tokenizer of model.hf_assets_path. Throws DataError if
/// the tokenizer cannot be read or has more ids than the model.
std::string training_sample(const train::TrainConfig& config, models::Llama& model);

}  // namespace phalanx::cli
