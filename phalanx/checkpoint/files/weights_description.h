// What weights on the disk say of the model that they belong to.
//
//   for (const auto& told : describe_weights("Qwen3-0.6B")) compare(told.model, wanted);   // told.source:
//   ".../config.json"
//
// Sources: a step directory's manifest, what an export or `consolidate` writes into the header of its files, and
// config.json in the same directory. Knows no torch tensor.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx {

/// The key in a safetensors header's __metadata__ that holds what metadata_for_weights() leaves of a checkpoint's.
inline constexpr const char* kMetadataInHeader = "phalanx";

struct WeightsDescription {
  std::string source;           // the file that says it
  models::LlamaConfig model;    // validated
  std::string metadata = "{}";  // a JSON object: the checkpoint's, or of a header what it has; of config.json none
};

/// `path`: a step directory, a directory with safetensors files, or one such file. Of a directory with files of several
/// models the first counts. Empty where nothing is said. CheckpointError names the file and key of what is malformed.
std::vector<WeightsDescription> describe_weights(const std::filesystem::path& path);

/// Of a checkpoint's metadata, {"model": {...}, ...}; nothing if it says no model. `where` begins the messages.
std::optional<models::LlamaConfig> model_in_metadata(const std::string& metadata, const std::string& where);
/// The fingerprint of the tokenizer that the weights were trained with (data/tokenizer/tokenizer_fingerprint.h), of a
/// checkpoint's metadata or of metadata_for_weights(); "" where they do not say it.
std::string tokenizer_in_metadata(const std::string& metadata);
/// The id that ended the documents that they were trained on (data/token_file.h), likewise.
std::optional<std::int64_t> document_end_in_metadata(const std::string& metadata);
/// The text of metadata that says the model alone.
std::string metadata_of_model(const models::LlamaConfig& model);
/// Of a checkpoint's metadata what may go out with its weights: the model and the tokenizer's fingerprint, no paths and
/// nothing of the data.
std::string metadata_for_weights(const std::string& metadata);

}  // namespace phalanx
