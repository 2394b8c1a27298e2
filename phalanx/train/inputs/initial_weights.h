// Finds a new run's initial weights, and checks that they are of this model and this tokenizer. It reads names and
// descriptions, no tensors, and does not use torch.
//
//   if (has_initial_weights(config)) {
//     for (const std::string& line : compare_initial_weights(config)) log_info(line);
//   }
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "phalanx/config/config.h"

namespace phalanx::train {

/// Whether a new run starts from weights of [checkpoint] initial_load_path, or of [model] hf_assets_path.
bool has_initial_weights(const config::TrainConfig& config);
/// The path of the initial weights. For a checkpoint folder it is the newest complete step; files, step directories and
/// folders of weights are returned as they are. Throws CheckpointError if there is nothing, or nothing of that kind.
std::filesystem::path initial_weights_path(const config::TrainConfig& config);
/// Throws CheckpointError if the weights have fewer bytes than the model has parameters. Call it before anything of the
/// model's size is allocated.
void check_initial_weights(const config::TrainConfig& config);
/// Compares the model that the weights' own description names with [model]. Throws CheckpointError with the list of
/// differences, unless there are none or [checkpoint] allow_model_mismatch is set. Otherwise returns lines for the log.
std::vector<std::string> compare_initial_weights(const config::TrainConfig& config);
/// The same for their tokenizer. `identity` is that of the data, as returned by training_tokenizer(). Another tokenizer
/// is allowed by [training] allow_tokenizer_mismatch.
std::vector<std::string> compare_initial_tokenizer(const config::TrainConfig& config, const nlohmann::json& identity);
/// A new run whose configuration does not mention initial weights starts from random ones. Throws ConfigError where
/// that cannot be intended.
void require_word_on_initial_weights(const config::TrainConfig& config);
/// As the configuration names them, without a look at the files.
std::string initial_weights_name(const config::TrainConfig& config);
/// Identifies the weights by content (checkpoint/files/weights_identity.h). Ranks that read shards of them must all
/// read the same weights.
nlohmann::json initial_weights_identity(const config::TrainConfig& config);

}  // namespace phalanx::train
