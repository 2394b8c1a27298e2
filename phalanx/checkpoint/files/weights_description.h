// Reads which model weights on disk belong to.
//
//   for (const WeightsDescription& told : describe_weights("Qwen3-0.6B")) {
//     compare(told.model, wanted);                                     // told.source: ".../config.json"
//   }
//
// The sources are a step directory's manifest, the header of files that an export or `consolidate` wrote, and
// config.json in the same directory. It does not use torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx {

/// The key in a safetensors header's __metadata__ that holds the result of metadata_for_weights().
inline constexpr const char* kMetadataInHeader = "phalanx";

struct WeightsDescription {
  std::string source;           // the file with the description
  models::LlamaConfig model;    // validated
  std::string metadata = "{}";  // a JSON object: the checkpoint's, or what a header has of it; empty for config.json
};

/// `path`: a step directory, a directory with safetensors files, or one such file. In a directory with files of several
/// models the first counts. Empty if there is no description. Throws CheckpointError that names the malformed file and
/// key.
std::vector<WeightsDescription> describe_weights(const std::filesystem::path& path);

/// The model in a checkpoint's metadata, {"model": {...}, ...}; nothing if there is none. `where` begins the messages.
std::optional<models::LlamaConfig> model_in_metadata(const std::string& metadata, const std::string& where);
/// The fingerprint of the tokenizer that the weights were trained with (data/tokenizer/tokenizer_fingerprint.h), from a
/// checkpoint's metadata or from metadata_for_weights(); "" if it is not there.
std::string tokenizer_in_metadata(const std::string& metadata);
/// Likewise, the id that ended the documents of the training data (data/token_file.h).
std::optional<std::int64_t> document_end_in_metadata(const std::string& metadata);
/// The text of metadata that describes only the model.
std::string metadata_of_model(const models::LlamaConfig& model);
/// The part of a checkpoint's metadata that may be published with its weights: the model and the tokenizer's
/// fingerprint, no paths and nothing about the data.
std::string metadata_for_weights(const std::string& metadata);

}  // namespace phalanx
