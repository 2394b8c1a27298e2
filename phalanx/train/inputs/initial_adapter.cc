#include "phalanx/train/inputs/initial_adapter.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/config/model_config.h"
#include "phalanx/train/inputs/initial_weights.h"

namespace phalanx::train {
namespace {

/// The metadata of the step directory that the initial weights are; an empty object if they are none.
nlohmann::json metadata_of_step(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path / kManifestName, error)) return nlohmann::json::object();
  auto metadata = nlohmann::json::parse(read_step_manifest(path).metadata, nullptr, /*allow_exceptions=*/false);
  return metadata.is_object() ? metadata : nlohmann::json::object();
}

nlohmann::json metadata_of_initial_weights(const config::TrainConfig& config) {
  if (config.checkpoint.initial_load_in_hf) return nlohmann::json::object();
  return metadata_of_step(initial_weights_path(config));
}

std::string text_of(const models::LoraOptions& lora, std::size_t layers) {
  return fmt::format("rank {}, alpha {}{} and {} layer{}", lora.rank, lora.alpha,
                     lora.use_rslora ? " with use_rslora" : "", layers, layers == 1 ? "" : "s");
}

std::string only_in(const std::string& who, const std::vector<std::string>& layers,
                    const std::vector<std::string>& others) {
  constexpr std::size_t kShown = 3;
  std::vector<std::string> only;
  for (const std::string& layer : layers) {
    if (std::ranges::find(others, layer) == others.end()) only.push_back(layer);
  }
  if (only.empty()) return "";
  const std::size_t more = only.size() - std::min(kShown, only.size());
  only.resize(only.size() - more);
  return fmt::format("; only {} has {}{}", who, fmt::join(only, ", "),
                     more > 0 ? fmt::format(" and {} more", more) : "");
}

/// What `found` and [lora] do not have in common; empty: they fit.
std::string difference(const config::TrainConfig& config, const models::LoraOptions& found,
                       const std::vector<std::string>& theirs) {
  const std::vector<std::string> ours = models::lora_layers(config::model_config(config), config.lora);
  const models::LoraOptions& own = config.lora;
  const bool is_same = found.rank == own.rank && found.alpha == own.alpha && found.use_rslora == own.use_rslora;
  if (is_same && theirs == ours) return "";
  return fmt::format("has {}, and this run {}: expected the same in [lora]{}{}", text_of(found, theirs.size()),
                     text_of(config.lora, ours.size()), only_in("it", theirs, ours), only_in("this run", ours, theirs));
}

/// For error messages.
constexpr const char* kMergeFirst =
    "`phalanx checkpoint merge` adds them to their base, for a run with initial_load_in_hf = true";

}  // namespace

bool initial_weights_hold_adapters(const config::TrainConfig& config) {
  const nlohmann::json metadata = metadata_of_initial_weights(config);
  const auto lora = metadata.find(kLoraInMetadata);
  if (lora == metadata.end()) return false;
  const std::string path = initial_weights_path(config).string();
  const models::LoraOptions saved = lora_from_metadata(*lora, path + ": metadata.lora");
  const std::string what = fmt::format("[checkpoint] initial_load_path '{}' is of a run that trained adapters", path);
  if (config.lora.rank == 0) {
    throw CheckpointError(fmt::format("{} (rank {}, alpha {}), which this run without [lora] would leave out: {}", what,
                                      saved.rank, saved.alpha, kMergeFirst));
  }
  if (!config.lora.initial_adapter.empty()) {
    throw CheckpointError(fmt::format("{}, and [lora] initial_adapter '{}' names others: expected one of the two; {}",
                                      what, config.lora.initial_adapter, kMergeFirst));
  }
  const auto layers = layers_with_adapters(config::model_config(config), saved, path + ": metadata.lora");
  const std::string differs = difference(config, saved, layers);
  if (!differs.empty()) throw CheckpointError(fmt::format("{}: it {}; or {}", what, differs, kMergeFirst));
  if (saved.base_dtype != config.lora.base_dtype) {
    throw CheckpointError(
        fmt::format("{} on a base in {}, and [lora] base_dtype is \"{}\": they would add to another base; expected "
                    "base_dtype = \"{}\"; or {}",
                    what, saved.base_dtype, config.lora.base_dtype, saved.base_dtype, kMergeFirst));
  }
  return true;
}

void refuse_adapter_in_weights_file(const config::TrainConfig& config, const std::string& name) {
  throw CheckpointError(fmt::format(
      "[checkpoint] initial_load_path '{}' holds adapters ({}), and nothing there says what they add: expected the "
      "checkpoint of the run that trained them, or their base with them added (`phalanx checkpoint merge`)",
      initial_weights_path(config).string(), name));
}

PeftAdapter read_initial_adapter(const config::TrainConfig& config) {
  PeftAdapter adapter = read_peft_adapter(config.lora.initial_adapter);
  const auto layers = layers_of_adapter(config::model_config(config), adapter);
  const std::string differs = difference(config, adapter.lora, layers);
  if (!differs.empty()) {
    throw CheckpointError(fmt::format("[lora] initial_adapter '{}' {}", adapter.folder.string(), differs));
  }
  require_base(adapter, initial_weights_path(config), /*allow_mismatch=*/false, /*flag=*/"");
  return adapter;
}

nlohmann::json base_identity(const config::TrainConfig& config) {
  const nlohmann::json metadata = metadata_of_initial_weights(config);
  if (!metadata.contains(kLoraInMetadata)) return initial_weights_identity(config);
  return metadata.value(kBaseInMetadata, nlohmann::json());
}

}  // namespace phalanx::train
