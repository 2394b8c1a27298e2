#include "phalanx/checkpoint/files/weights_description.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_text.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx {
namespace {

bool is_weights_file(const std::filesystem::path& path) {
  std::error_code error;
  return path.extension() == ".safetensors" && std::filesystem::is_regular_file(path, error);
}

/// Any one of several files of one model will do: all have the same description.
std::optional<std::filesystem::path> any_weights_file(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (is_weights_file(entry.path())) files.push_back(entry.path());
  }
  const auto first = std::ranges::min_element(files);
  return first == files.end() ? std::nullopt : std::optional(*first);
}

/// "{}" also for a file that cannot be read: the code that loads it reports the error better.
std::string metadata_in_header(const std::filesystem::path& file) {
  try {
    const safetensors::File weights(file.string());
    const auto& header = weights.header().metadata;
    const auto text = header.find(kMetadataInHeader);
    return text == header.end() ? "{}" : text->second;
  } catch (const Error&) {
    return "{}";
  }
}

void add_metadata(std::vector<WeightsDescription>& found, std::string metadata, const std::string& source) {
  const auto model = model_in_metadata(metadata, source);
  if (model) found.push_back({.source = source, .model = *model, .metadata = std::move(metadata)});
}

}  // namespace

std::optional<models::LlamaConfig> model_in_metadata(const std::string& metadata, const std::string& where) {
  const auto json = parse_json_object<CheckpointError>(metadata, where);
  const auto model = json.find("model");
  if (model == json.end()) return std::nullopt;
  if (!model->is_object()) throw CheckpointError(fmt::format("{}: metadata.model is not an object", where));
  // Another program may have saved less than `phalanx train` does.
  if (!model->contains("dim") || !model->contains("rope_theta")) return std::nullopt;
  models::LlamaConfig config = models::llama_from_metadata(*model, where + ": metadata.model");
  try {
    config.validate();
  } catch (const ConfigError& error) {
    throw CheckpointError(fmt::format("{}: metadata.{}", where, error.what()));
  }
  return config;
}

std::string tokenizer_in_metadata(const std::string& metadata) {
  const auto json = nlohmann::json::parse(metadata);
  const nlohmann::json::json_pointer at("/run/tokenizer/fingerprint");
  return json.contains(at) && json.at(at).is_string() ? json.at(at).get<std::string>() : std::string();
}

std::optional<std::int64_t> document_end_in_metadata(const std::string& metadata) {
  const auto json = nlohmann::json::parse(metadata);
  const nlohmann::json::json_pointer at("/run/tokenizer/document_end");
  if (!json.contains(at)) return std::nullopt;
  const nlohmann::json& end = json.at(at);
  if (end == data::document_end_json(data::kNoDocumentEnd)) return data::kNoDocumentEnd;
  return end.is_number_unsigned() ? std::optional(end.get<std::int64_t>()) : std::nullopt;
}

std::string metadata_of_model(const models::LlamaConfig& model) {
  return nlohmann::json({{"model", models::llama_metadata(model)}}).dump();
}

std::string metadata_for_weights(const std::string& metadata) {
  const auto json = nlohmann::json::parse(metadata);
  nlohmann::json kept = nlohmann::json::object();
  if (json.contains("model")) kept["model"] = json["model"];
  if (const auto run = json.find("run"); run != json.end() && run->is_object()) {
    for (const char* key : {"version", "tokenizer"}) {
      if (run->contains(key)) kept["run"][key] = run->at(key);
    }
  }
  return kept.dump();
}

std::vector<WeightsDescription> describe_weights(const std::filesystem::path& path) {
  std::error_code error;
  std::vector<WeightsDescription> found;
  const bool is_folder = std::filesystem::is_directory(path, error);
  if (is_folder && std::filesystem::exists(path / kManifestName, error)) {
    add_metadata(found, read_step_manifest(path).metadata, (path / kManifestName).string());
    return found;
  }
  const auto file = is_folder ? any_weights_file(path) : std::optional(path);
  if (file && is_weights_file(*file)) add_metadata(found, metadata_in_header(*file), file->string());
  const auto config = (is_folder ? path : path.parent_path()) / "config.json";
  if (std::filesystem::is_regular_file(config, error)) {
    found.push_back(
        {.source = config.string(),
         .model = models::llama_config_from_hf(read_file(config, models::kMaxHfConfigBytes), config.string())});
  }
  return found;
}

}  // namespace phalanx
