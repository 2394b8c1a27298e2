#include "phalanx/train/run_checkpoints.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/checkpoint/checkpoint_list.h"
#include "phalanx/checkpoint/hf_weights.h"
#include "phalanx/models/llama_json.h"
#include "phalanx/train/first_rank.h"
#include "phalanx/train/model_config.h"

namespace phalanx::train {
namespace {

using Clock = std::chrono::steady_clock;

double elapsed_seconds(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Found out before the first step: otherwise all steps up to the first save would be lost.
void check_can_save(const std::string& folder) {
  posix_file_system().make_directory(folder);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw CheckpointError(fmt::format("[checkpoint] folder: cannot write to '{}': {}", folder, std::strerror(errno)));
  }
}

/// A checkpoint folder stands for its newest complete step; files, step directories and folders of weights for
/// themselves.
std::filesystem::path initial_weights(const TrainConfig& run) {
  const TrainConfig::Checkpoint& config = run.checkpoint;
  const bool is_given = !config.initial_load_path.empty();
  const std::filesystem::path path = is_given ? config.initial_load_path : run.model.hf_assets_path;
  if (!std::filesystem::exists(path)) {
    throw CheckpointError(fmt::format("{} '{}' does not exist",
                                      is_given ? "[checkpoint] initial_load_path" : "[model] hf_assets_path",
                                      path.string()));
  }
  if (config.initial_load_in_hf || !std::filesystem::is_directory(path)) return path;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() == ".safetensors") return path;
  }
  return resolve_checkpoint(path);
}

/// The directory of [checkpoint] load_step.
std::filesystem::path chosen_step(const std::string& folder, std::int64_t step) {
  const std::filesystem::path path = step_directory(folder, step);
  if (std::filesystem::exists(path)) return path;
  std::string there;
  for (const auto& found : list_checkpoints(folder).complete) {
    there += fmt::format("{}{}", there.empty() ? "" : ", ", found.step);
  }
  throw CheckpointError(fmt::format("[checkpoint] load_step is {}, but there is no {}; complete checkpoints there: {}",
                                    step, path.string(), there.empty() ? "none" : there));
}

}  // namespace

bool has_initial_weights(const TrainConfig& config) {
  return config.checkpoint.initial_load_in_hf || !config.checkpoint.initial_load_path.empty();
}

void check_initial_weights(const TrainConfig& config) {
  const bool from_directory = config.model.flavor == "hf";
  refuse_more_parameters_than_bytes(
      initial_weights(config), model_config(config).parameter_count(),
      from_directory ? (std::filesystem::path(config.model.hf_assets_path) / "config.json").string() : "[model]");
}

void load_initial_weights(const TrainConfig& config, const std::vector<NamedTensor>& weights, const Say& say) {
  const std::filesystem::path path = initial_weights(config);
  const models::LlamaConfig model = model_config(config);
  const bool in_hf = config.checkpoint.initial_load_in_hf;
  // A stage of a pipeline leaves to the others what is theirs.
  LoadWeightsOptions options;
  if (in_hf) {
    options = hf_weights_of_part(model);
  } else {
    options.elsewhere = [shapes = models::llama_parameter_shapes(model)](const std::string& name) {
      return shapes.contains(name);
    };
  }
  const LoadedWeights loaded = load_weights(path, weights, options);
  say(fmt::format("initial weights: {} ({})", path.string(), human_bytes(loaded.bytes)));
  if (!loaded.ignored.empty()) say(fmt::format("not read from there: {}", brief_names(loaded.ignored)));
}

RunCheckpoints::RunCheckpoints(const TrainConfig& config, std::shared_ptr<Communicator> world, Say say)
    : config_(config.checkpoint),
      folder_(in_dump_folder(config, config.checkpoint.folder)),
      world_(std::move(world)),
      say_(std::move(say)) {}

bool RunCheckpoints::continues() const {
  return config_.enable && (config_.load_step >= 0 || !list_checkpoints(folder_).complete.empty());
}

std::optional<std::int64_t> RunCheckpoints::load(TrainState& state) {
  if (!config_.enable) return std::nullopt;
  on_first_rank(*world_, [&] { check_can_save(folder_); });
  manager_ =
      std::make_unique<CheckpointManager>(folder_,
                                          CheckpointOptions{.keep_latest_k = static_cast<int>(config_.keep_latest_k),
                                                            .convert_dtype = config_.convert_dtype},
                                          world_);
  if (config_.async_mode == "async") manager_->reserve(state);
  std::optional<LoadedCheckpoint> loaded;
  if (config_.load_step >= 0) {
    loaded = manager_->load(chosen_step(folder_, config_.load_step), state);
  } else {
    loaded = manager_->load_latest(state);
  }
  if (!loaded) return std::nullopt;
  saved_step_ = state.integers.at("step");
  say_(fmt::format("continuing from {} (step {}, {})", loaded->path.string(), saved_step_, human_bytes(loaded->bytes)));
  return saved_step_;
}

void RunCheckpoints::save(const TrainState& state, std::int64_t step, const std::string& metadata) {
  if (!manager_ || saved_step_ == step) return;
  const auto begin = Clock::now();
  if (config_.async_mode == "async") {
    manager_->save_async(state, step, metadata);
    say_(fmt::format("saving step {} while training goes on (copied in {})", step,
                     human_duration(elapsed_seconds(begin))));
  } else {
    const SavedCheckpoint saved = manager_->save(state, step, metadata);
    say_(fmt::format("saved {} ({}, {})", saved.path.string(), human_bytes(saved.bytes),
                     human_duration(elapsed_seconds(begin))));
  }
  saved_step_ = step;
}

void RunCheckpoints::finish() {
  if (!manager_) return;
  const auto begin = Clock::now();
  if (const auto saved = manager_->finish()) {
    say_(fmt::format("saved {} ({}, waited {})", saved->path.string(), human_bytes(saved->bytes),
                     human_duration(elapsed_seconds(begin))));
  }
}

}  // namespace phalanx::train
