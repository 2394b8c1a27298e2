#include "phalanx/train/inputs/run_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/config/config_checks.h"
#include "phalanx/config/config_problems.h"
#include "phalanx/config/config_reader.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/data/token_file.h"
#include "phalanx/train/inputs/conversation_data.h"
#include "phalanx/train/inputs/initial_weights.h"
#include "phalanx/train/inputs/training_files.h"

namespace phalanx::train {
namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// Opens the file if it does not exist, for the error that this throws.
void require_token_file(const std::string& path) {
  std::string prefix = path;
  if (path.ends_with(".bin") || path.ends_with(".idx")) prefix.resize(path.size() - 4);
  if (!is_there(path) && !is_there(prefix + ".idx")) const data::TokenFile file(path);
}

/// Whether there is a checkpoint that the run resumes from, so that it reads no initial weights.
bool goes_on(const config::TrainConfig& config) {
  const auto& checkpoint = config.checkpoint;
  return checkpoint.enable && !list_checkpoints(config::in_dump_folder(config, checkpoint.folder)).complete.empty();
}

void check_files(const config::ConfigReading& reading, const std::optional<config::RunPlan>& plan,
                 config::ConfigProblems& problems) {
  const config::TrainConfig& config = reading.config;
  const auto check = [&](const char* key, auto&& body) {
    if (!reading.wrong_keys.contains(key)) problems.collect(body);
  };
  const auto check_token_files = [&](const char* section, const std::string& path, const config::Datasets& sets) {
    check(fmt::format("{}.dataset_path", section).c_str(), [&] {
      if (!path.empty()) require_token_file(path);
    });
    for (const config::Dataset& set : sets) problems.collect([&] { require_token_file(set.path); });
  };
  check_token_files("training", config.training.dataset_path, config.training.datasets);
  if (config.validation.enable) {
    check_token_files("validation", config.validation.dataset_path, config.validation.datasets);
  }
  if (config::trains_on_chats(config) && !config.model.hf_assets_path.empty() &&
      !reading.wrong_keys.contains("model.hf_assets_path")) {
    check(config.dpo.preferences.empty() ? "sft.conversations" : "dpo.preferences",
          [&] { check_conversations(config); });
  }
  check("model.hf_assets_path", [&] {
    const std::string& folder = config.model.hf_assets_path;
    if (config.model.flavor == config::kFlavorOfDirectory || folder.empty()) return;  // reported with the model
    if (!is_there(folder)) training_tokenizer(config, 0, {});
    if (!config.metrics.sample_prompt.empty()) require_sample_tokenizer(config);
  });
  if (!plan) return;  // the files' contents are compared with the plan
  nlohmann::json tokenizer = nlohmann::json::object();
  const auto are_right = [&](std::initializer_list<const char*> keys) {
    return std::ranges::none_of(keys, [&](const char* key) { return reading.wrong_keys.contains(key); });
  };
  const bool packs_apart = config.training.packing == "none" || config.training.attn_mask_type == "block_causal";
  const bool data_are_read =
      (!config::training_datasets(config).empty() || !config.stream.paths.empty()) && packs_apart &&
      are_right({"stream.paths", "stream.field", "stream.window", "stream.workers", "stream.special_tokens",
                 "training.dataset_path", "training.datasets", "validation.datasets", "training.dataset_dtype",
                 "training.attn_mask_type", "training.packing", "validation.enable", "validation.dataset_path",
                 "validation.fraction", "validation.local_batch_size", "training.allow_tokenizer_mismatch",
                 "model.hf_assets_path"});
  if (data_are_read) problems.collect([&] { tokenizer = open_training_files(config, *plan).tokenizer.identity; });
  const bool weights_are_read =
      are_right({"checkpoint.enable", "checkpoint.folder", "checkpoint.initial_load_path",
                 "checkpoint.initial_load_in_hf", "checkpoint.initial_random_weights",
                 "checkpoint.allow_model_mismatch", "training.allow_tokenizer_mismatch", "model.hf_assets_path"});
  if (!weights_are_read) return;
  problems.collect([&] {
    if (goes_on(config)) return;
    require_word_on_initial_weights(config);
    if (!has_initial_weights(config)) return;
    check_initial_weights(config);
    compare_initial_weights(config);
    compare_initial_tokenizer(config, tokenizer);
  });
}

}  // namespace

config::TrainConfig read_run_config(const std::string& path, const std::vector<std::string>& overrides,
                                    const RunChecks& checks, std::vector<std::string>* notes) {
  config::ConfigReading reading = config::take_config(config::config_text(path), path, overrides);
  config::ConfigProblems& problems = reading.problems;
  const config::TrainConfig& config = reading.config;
  std::optional<config::RunPlan> plan;
  if (checks.look_at_files || config.model.flavor != config::kFlavorOfDirectory) {
    plan = config::collect_plan(config, checks.ranks, reading.wrong_keys, problems);
  }
  problems.collect([&] { config::require_dump_folder(config); });
  if (!reading.wrong_keys.contains("training.dataset_path") && !reading.wrong_keys.contains("training.datasets")) {
    problems.collect([&] { config::require_dataset(config); });
  }
  if (checks.look_at_files) check_files(reading, plan, problems);
  problems.throw_if_any(path);
  config::take_notes(reading.notes, notes);
  return config;
}

void require_sample_tokenizer(const config::TrainConfig& config) {
  const fs::path path = fs::path(config.model.hf_assets_path) / "tokenizer.json";
  if (is_there(path.string())) return;
  throw DataError(
      fmt::format("there is no '{}': [metrics] sample_prompt needs the tokenizer, and [model] hf_assets_path "
                  "names its folder",
                  path.string()));
}

}  // namespace phalanx::train
