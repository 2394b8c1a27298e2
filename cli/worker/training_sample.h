// Sample text from a model after training, for the run's report.
#pragma once

#include <string>

#include "phalanx/config/config.h"
#include "phalanx/models/llama.h"

namespace phalanx::cli {

/// Throws DataError if the tokenizer of model.hf_assets_path cannot be read or has more ids than the model. Call it
/// before the training, which may take hours.
void check_sample_tokenizer(const config::TrainConfig& config);

/// The text that the model generates after metrics.sample_prompt, with the tokenizer of model.hf_assets_path. Throws
/// DataError if the tokenizer cannot be read or has more ids than the model.
std::string training_sample(const config::TrainConfig& config, models::Llama& model);

}  // namespace phalanx::cli
