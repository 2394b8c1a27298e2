// Where a new run's weights come from, and whether they are of this model and this tokenizer. Reads names and
// descriptions, no tensors; without torch.
//
//   if (has_initial_weights(config)) for (const std::string& line : compare_initial_weights(config)) say(line);
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "phalanx/config/config.h"

namespace phalanx::train {

/// Whether a new run starts from weights of [checkpoint] initial_load_path, or of [model] hf_assets_path.
bool has_initial_weights(const TrainConfig& config);
/// Where they lie. A checkpoint folder stands for its newest complete step; files, step directories and folders of
/// weights for themselves. CheckpointError where there is nothing, or nothing of that kind.
std::filesystem::path initial_weights_path(const TrainConfig& config);
/// CheckpointError where they have fewer bytes than the model has parameters. For before anything of its size is made.
void check_initial_weights(const TrainConfig& config);
/// What comes with these weights says of which model they are. CheckpointError with the list of differences unless that
/// is [model]'s, or [checkpoint] allow_model_mismatch; what there is to say otherwise, in lines.
std::vector<std::string> compare_initial_weights(const TrainConfig& config);
/// The same of their tokenizer: `identity` is that of the data, as training_tokenizer() says it; allowed is another one
/// by [training] allow_tokenizer_mismatch.
std::vector<std::string> compare_initial_tokenizer(const TrainConfig& config, const nlohmann::json& identity);
/// A new run without a word on its weights starts from random ones. Refused where that cannot be meant: ConfigError.
void require_word_on_initial_weights(const TrainConfig& config);
/// Which they are, by their content (checkpoint/files/weights_identity.h): ranks that take parts of them must read the same.
nlohmann::json initial_weights_identity(const TrainConfig& config);

}  // namespace phalanx::train
