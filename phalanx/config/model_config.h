// Makes the model configuration from the [model] section. The dimensions are the flavor's, or with flavor "hf" those of
// config.json in hf_assets_path. Explicit keys override them.
#pragma once

#include "phalanx/config/config.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::config {

/// The result is validated. max_seq_len is training.seq_len, or the file's if that is larger. Throws ConfigError, and
/// CheckpointError for errors in config.json.
models::LlamaConfig model_config(const TrainConfig& config);

/// The configuration with every dimension of the model written out, as `--print-config` shows it.
TrainConfig with_model_numbers(TrainConfig config);

}  // namespace phalanx::config
