// From the [model] section to the model: the flavor's numbers, or with flavor "hf" those of config.json in
// hf_assets_path, changed by the explicit keys.
#pragma once

#include "phalanx/config/config.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::train {

/// Validated; max_seq_len is training.seq_len, or the file's if that is more. Throws ConfigError; CheckpointError for
/// what is wrong with config.json.
models::LlamaConfig model_config(const TrainConfig& config);

/// The configuration with every number of the model written out, as `--print-config` shows it.
TrainConfig with_model_numbers(TrainConfig config);

}  // namespace phalanx::train
