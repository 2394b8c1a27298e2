// Reads keys of one JSON object of a model's files. Errors are CheckpointErrors that name file and key.
//
//   const JsonReader read(json, "config.json");
//   const auto layers = read.get<std::int64_t>("num_hidden_layers");
#pragma once

#include "phalanx/base/error.h"
#include "phalanx/base/json_reader.h"

namespace phalanx::models {

using JsonReader = phalanx::JsonReader<CheckpointError>;

}  // namespace phalanx::models
