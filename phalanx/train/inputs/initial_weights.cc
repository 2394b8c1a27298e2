#include "phalanx/train/inputs/initial_weights.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/files/weight_files.h"
#include "phalanx/checkpoint/files/weights_description.h"
#include "phalanx/checkpoint/files/weights_identity.h"
#include "phalanx/config/model_config.h"
#include "phalanx/data/token_sidecar.h"
#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"
#include "phalanx/models/config/model_identity.h"

namespace phalanx::train {

bool has_initial_weights(const config::TrainConfig& config) {
  return config.checkpoint.initial_load_in_hf || !config.checkpoint.initial_load_path.empty();
}

std::filesystem::path initial_weights_path(const config::TrainConfig& run) {
  const config::TrainConfig::Checkpoint& config = run.checkpoint;
  const bool is_given = !config.initial_load_path.empty();
  std::filesystem::path path = is_given ? config.initial_load_path : run.model.hf_assets_path;
  if (!std::filesystem::exists(path)) {
    throw CheckpointError(fmt::format("{} '{}' does not exist{}",
                                      is_given ? "[checkpoint] initial_load_path" : "[model] hf_assets_path",
                                      path.string(), hub_hint(path.string())));
  }
  if (config.initial_load_in_hf || !std::filesystem::is_directory(path)) return path;
  if (std::filesystem::exists(path / "config.json")) {
    throw CheckpointError(fmt::format(
        "[checkpoint] initial_load_path '{}' is a Hugging Face directory, for it has config.json: initial_load_in_hf = "
        "true loads it; without it a checkpoint of Phalanx is expected",
        path.string()));
  }
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() == ".safetensors") return path;
  }
  return resolve_checkpoint(path);
}

void check_initial_weights(const config::TrainConfig& config) {
  const bool from_directory = config.model.flavor == "hf";
  refuse_more_parameters_than_bytes(
      initial_weights_path(config), models::least_bytes(config::model_config(config), config.lora),
      from_directory ? (std::filesystem::path(config.model.hf_assets_path) / "config.json").string() : "[model]");
}

std::vector<std::string> compare_initial_weights(const config::TrainConfig& config) {
  const std::filesystem::path path = initial_weights_path(config);
  const auto descriptions = describe_weights(path);
  if (descriptions.empty()) {
    return {fmt::format(
        "initial weights: nothing at {} says of which model they are: rotary settings, norm_eps, the activation and "
        "the number of heads could not be compared with [model]",
        path.string())};
  }
  std::vector<std::string> lines;
  const models::LlamaConfig model = config::model_config(config);
  for (const WeightsDescription& told : descriptions) {
    const auto differences = models::model_differences(told.model, model);
    const bool fit = models::have_same_shapes(models::model_identity(told.model), models::model_identity(model));
    if (!differences.empty() && !(fit && config.checkpoint.allow_model_mismatch)) {
      throw CheckpointError(fmt::format(
          "the weights at {} are of another model than [model] describes, by {}:{}\nset [model] so that it is the same "
          "one (flavor = \"hf\" with hf_assets_path takes all of a Hugging Face directory's config.json){}",
          path.string(), told.source, models::model_differences_text(differences),
          fit ? "; [checkpoint] allow_model_mismatch = true loads them all the same"
              : ": their tensors have other names or shapes than this model's, so no key can load them"));
    }
    for (const auto& one : differences) {
      lines.push_back(
          fmt::format("initial weights: loaded as [checkpoint] allow_model_mismatch says, although {} has {}: {}, and "
                      "this model {}",
                      told.source, one.key, json_value_text(one.saved), json_value_text(one.found)));
    }
    if (told.model.max_seq_len < config.training.seq_len) {
      lines.push_back(fmt::format("initial weights: of a model of sequences up to {} by {}; [training] seq_len is {}",
                                  told.model.max_seq_len, told.source, config.training.seq_len));
    }
  }
  return lines;
}

std::vector<std::string> compare_initial_tokenizer(const config::TrainConfig& config, const nlohmann::json& identity) {
  const std::filesystem::path path = initial_weights_path(config);
  const std::string mine = identity.value("fingerprint", "");
  std::string theirs, source;
  std::vector<std::string> lines;
  for (const WeightsDescription& told : describe_weights(path)) {
    if (!theirs.empty()) break;
    theirs = tokenizer_in_metadata(told.metadata);
    source = told.source;
    const auto before = document_end_in_metadata(told.metadata);
    const auto now = identity.find("document_end");
    if (before && now != identity.end() && *now != data::document_end_json(*before)) {
      lines.push_back(
          fmt::format("initial weights: the documents that they were trained on end {}; in this run's data "
                      "\"document_end\" is {}",
                      data::document_end_text(*before), now->dump()));
    }
  }
  std::error_code no_folder;
  const auto folder = std::filesystem::is_directory(path, no_folder) ? path : path.parent_path();
  const std::filesystem::path beside = folder / "tokenizer.json";
  if (std::error_code error; theirs.empty() && std::filesystem::is_regular_file(beside, error)) {
    theirs = data::fingerprint_of_file(beside);
    source = beside.string();
  }
  if (!data::are_other_tokenizers(theirs, mine)) {
    if (!theirs.empty() && theirs == mine) return lines;
    lines.push_back(
        fmt::format("initial weights: the tokenizer of {} ({}) could not be compared with that of the data ({})",
                    path.string(), theirs.empty() ? "not said" : theirs, mine.empty() ? "not said" : mine));
    return lines;
  }
  const std::string found = fmt::format(
      "the weights at {} were trained with the tokenizer {} (so says {}), but that of this run's data is {}",
      path.string(), theirs, source, mine);
  if (!config.training.allow_tokenizer_mismatch) {
    throw CheckpointError(found +
                          ": the same ids would mean other texts; make the token files by `phalanx tokenize` with the "
                          "weights' tokenizer; [training] allow_tokenizer_mismatch = true trains all the same");
  }
  lines.push_back("initial weights: " + found + ": trained all the same, as [training] allow_tokenizer_mismatch says");
  return lines;
}

void require_word_on_initial_weights(const config::TrainConfig& config) {
  if (config.model.flavor != config::kFlavorOfDirectory || has_initial_weights(config)) return;
  if (config.checkpoint.initial_random_weights) return;
  throw ConfigError(
      fmt::format("[model] flavor is \"hf\", the shape of the model in '{}', but nothing says where this run's weights "
                  "come from: [checkpoint] initial_load_in_hf = true starts from those of the directory, [checkpoint] "
                  "initial_random_weights = true from random ones",
                  config.model.hf_assets_path));
}

std::string initial_weights_name(const config::TrainConfig& config) {
  const std::string& path = config.checkpoint.initial_load_path;
  return path.empty() ? config.model.hf_assets_path : path;
}

nlohmann::json initial_weights_identity(const config::TrainConfig& config) {
  return weights_identity(initial_weights_path(config));
}

}  // namespace phalanx::train
