#include "phalanx/train/run_check.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/data/token_file.h"
#include "phalanx/train/config_checks.h"
#include "phalanx/train/config_problems.h"
#include "phalanx/train/config_reader.h"
#include "phalanx/train/run_plan.h"
#include "phalanx/train/training_tokenizer.h"

namespace phalanx::train {
namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// Opens it where it is not there, for that error; what it holds is the ranks' to look at.
void require_token_file(const std::string& path) {
  std::string prefix = path;
  if (path.ends_with(".bin") || path.ends_with(".idx")) prefix.resize(path.size() - 4);
  if (!is_there(path) && !is_there(prefix + ".idx")) const data::TokenFile file(path);
}

void check_files(const ConfigReading& reading, ConfigProblems& problems) {
  const TrainConfig& config = reading.config;
  const auto check = [&](const char* key, auto&& body) {
    if (!reading.wrong_keys.contains(key)) problems.collect(body);
  };
  const std::string& dataset = config.training.dataset_path;
  check("training.dataset_path", [&] {
    if (!dataset.empty()) require_token_file(dataset);
  });
  check("validation.dataset_path", [&] {
    if (config.validation.enable && !config.validation.dataset_path.empty()) {
      require_token_file(config.validation.dataset_path);
    }
  });
  check("model.hf_assets_path", [&] {
    const std::string& folder = config.model.hf_assets_path;
    if (config.model.flavor == kFlavorOfDirectory || folder.empty()) return;  // told with the model
    if (!is_there(folder)) training_tokenizer(config, 0, {});
    if (!config.metrics.sample_prompt.empty()) require_sample_tokenizer(config);
  });
}

}  // namespace

TrainConfig read_run_config(const std::string& path, const std::vector<std::string>& overrides, const RunChecks& checks,
                            std::vector<std::string>* notes) {
  ConfigReading reading = take_config(config_text(path), path, overrides);
  ConfigProblems& problems = reading.problems;
  const TrainConfig& config = reading.config;
  if (checks.look_at_files || config.model.flavor != kFlavorOfDirectory) {
    collect_plan(config, checks.ranks, reading.wrong_keys, problems);
  }
  problems.collect([&] { require_dump_folder(config); });
  if (!reading.wrong_keys.contains("training.dataset_path")) problems.collect([&] { require_dataset(config); });
  if (checks.look_at_files) check_files(reading, problems);
  problems.throw_if_any(path);
  take_notes(reading.notes, notes);
  return config;
}

void require_sample_tokenizer(const TrainConfig& config) {
  const fs::path path = fs::path(config.model.hf_assets_path) / "tokenizer.json";
  if (is_there(path.string())) return;
  throw DataError(
      fmt::format("there is no '{}': [metrics] sample_prompt needs the tokenizer, and [model] hf_assets_path "
                  "names its folder",
                  path.string()));
}

}  // namespace phalanx::train
