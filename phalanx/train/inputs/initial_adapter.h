// The adapters that a new run of [lora] begins with, and the base that they are added to. It does not use torch.
//
// They are new ones, those of [lora] initial_adapter, or those of the initial weights, if these are a checkpoint of a
// run that trained adapters. Such a checkpoint goes on only with the same ones: without them, or with another share of
// them, its base would be another model than the one that was saved.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "phalanx/checkpoint/files/peft_adapter.h"
#include "phalanx/config/config.h"

namespace phalanx::train {

/// Whether the initial weights are a checkpoint that holds adapters, which are loaded with the base. Throws
/// CheckpointError if they are not those of [lora]: in rank, alpha or layers.
bool initial_weights_hold_adapters(const config::TrainConfig& config);

/// For weights in a file that has the tensor `name` of an adapter: nothing in it says what its adapters add.
[[noreturn]] void refuse_adapter_in_weights_file(const config::TrainConfig& config, const std::string& name);

/// The adapter of [lora] initial_adapter. Throws CheckpointError if it is not one of [lora], or was trained on another
/// base than the initial weights.
PeftAdapter read_initial_adapter(const config::TrainConfig& config);

/// The fingerprint of the base that the run's adapters are trained on: that of the initial weights, or of the base of
/// the run that saved them. Null if that run did not know it.
nlohmann::json base_identity(const config::TrainConfig& config);

}  // namespace phalanx::train
