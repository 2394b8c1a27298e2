#include "phalanx/train/run_checkpoints.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <system_error>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/checkpoint/adapter_weights.h"
#include "phalanx/checkpoint/expert_biases.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/branch.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/hf_weights.h"
#include "phalanx/checkpoint/nf4_layers.h"
#include "phalanx/checkpoint/nf4_weights.h"
#include "phalanx/config/model_config.h"
#include "phalanx/config/run_identity.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/config/parameter_kinds.h"
#include "phalanx/train/inputs/initial_adapter.h"
#include "phalanx/train/inputs/initial_weights.h"
#include "phalanx/train/model/nf4_base.h"
#include "phalanx/train/ranks/first_rank.h"
#include "phalanx/train/run_rollback.h"

namespace phalanx::train {
namespace {

using Clock = std::chrono::steady_clock;

double elapsed_seconds(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Checked before the first step: otherwise all steps up to the first save would be lost.
void check_can_save(const std::string& folder) {
  posix_file_system().make_directory(folder);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw CheckpointError(fmt::format("[checkpoint] folder: cannot write to '{}': {}", folder, std::strerror(errno)));
  }
}

constexpr std::string_view kOneFolder =
    "expected one folder for all ranks, for each writes its part of a checkpoint: one on a network file system, named "
    "by "
    "[job] dump_folder or [checkpoint] folder; a relative path begins at each rank's working directory";

/// Collective. Checks now, and not at the first save, that all ranks see what the first rank writes to the folder.
void require_one_folder(const std::string& folder, const std::shared_ptr<Communicator>& world) {
  if (world->size() == 1) return;
  constexpr auto kPatience = std::chrono::seconds(3);  // delay of a network file system
  const auto path = std::filesystem::path(folder) / ".phalanx.seen_by_all";
  std::string word;
  on_first_rank(*world, [&] {
    word = fmt::format("{:016x}", std::random_device()() * std::uint64_t{0x9e3779b97f4a7c15});
    replace_file(path, word);
  });
  word = world->broadcast_bytes(word);
  const auto sees_file = [&] {
    std::error_code error;
    for (const auto begin = Clock::now(); Clock::now() - begin < kPatience;) {
      if (std::filesystem::exists(path, error) && read_file(path) == word) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    throw CheckpointError(fmt::format("{}: what rank 0 writes there is not seen by this rank: {}", folder, kOneFolder));
  };
  const auto remove = [&] {
    std::error_code error;
    if (world->rank() == 0) std::filesystem::remove(path, error);
  };
  try {
    on_every_rank(world, sees_file);
  } catch (...) {
    remove();
    throw;
  }
  remove();
}

/// The directory of [checkpoint] load_step.
std::filesystem::path chosen_step(const std::string& folder, std::int64_t step) {
  std::filesystem::path path = step_directory(folder, step);
  if (std::filesystem::exists(path)) return path;
  std::string there;
  for (const auto& found : list_checkpoints(folder).complete) {
    there += fmt::format("{}{}", there.empty() ? "" : ", ", found.step);
  }
  std::string aside;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const auto moved = entry.path() / path.filename();
    if (std::filesystem::exists(moved, error)) aside = fmt::format("; {} was set aside: move it back", moved.string());
  }
  throw CheckpointError(
      fmt::format("[checkpoint] load_step is {}, but there is no {}; complete checkpoints there: {}{}", step,
                  path.string(), there.empty() ? "none" : there, aside));
}

/// The hash is the same for the same settings, however their paths are written. Settings that change no number are left
/// out.
std::string hash_of_settings(config::TrainConfig config) {
  for (std::string* path :
       {&config.model.hf_assets_path, &config.training.dataset_path, &config.validation.dataset_path}) {
    std::error_code error;
    const auto canonical = std::filesystem::weakly_canonical(*path, error);
    if (!path->empty() && !error) *path = canonical.string();
  }
  return hash_of_text(
      config::settings_that_count(config).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

[[noreturn]] void refuse_expert_biases(const std::filesystem::path& path) {
  throw CheckpointError(
      fmt::format("the weights at {} were trained with biases by which experts are chosen: set [training] "
                  "moe_router_enable_expert_bias = true, and moe_router_bias_update_rate = 0 to leave them as they are",
                  path.string()));
}

std::string list_of_steps(const std::vector<std::string>& names) { return fmt::format("{}", fmt::join(names, ", ")); }

}  // namespace

void load_initial_weights(const config::TrainConfig& config, const std::vector<NamedTensor>& weights,
                          const LogFunction& log_info) {
  const std::filesystem::path path = initial_weights_path(config);
  const models::LlamaConfig model = config::model_config(config);
  const bool in_hf = config.checkpoint.initial_load_in_hf;
  // A pipeline stage does not read the weights of the other stages.
  const bool has_adapters = initial_weights_hold_adapters(config);
  LoadWeightsOptions options;
  if (in_hf) {
    options = hf_weights_of_part(model);
  } else {
    options.elsewhere = [&, shapes = models::llama_weight_shapes(model)](const std::string& name) {
      if (models::is_lora_name(name) && !has_adapters) refuse_adapter_in_weights_file(config, name);
      if (models::is_expert_bias(name)) refuse_expert_biases(path);
      return shapes.contains(weight_of_nf4_scales(name)) || models::is_lora_name(name);
    };
  }
  std::vector<NamedTensor> wanted = weights;
  const auto is_bias = [](const NamedTensor& one) { return models::is_expert_bias(one.name); };
  if (std::ranges::any_of(wanted, is_bias) && !model.has_expert_biases() && !holds_expert_biases(path)) {
    std::erase_if(wanted, is_bias);
    log_info(fmt::format("initial weights: {} has no biases of experts: they begin with 0", path.string()));
  }
  LoadedWeights loaded;
  if (has_adapters) {
    loaded = load_weights(path, wanted, options);
  } else {
    refuse_nf4_files(config, path);
    const LoadWeightsOptions of_matrices = options;
    const auto files = std::make_shared<const BitsAndBytesFiles>(path);
    if (config.lora.has_nf4_base()) {
      options.elsewhere = [known = options.elsewhere, files](const std::string& name) {
        return known(name) || files->is_part(name);
      };
    }
    const std::vector<NamedTensor> base = base_among(wanted);
    loaded = load_weights(path, without_nf4(config, base), options);
    loaded.bytes += load_nf4_base(config, path, base, of_matrices);
  }
  log_info(fmt::format("initial weights: {} ({})", path.string(), human_bytes(loaded.bytes)));
  if (!config.lora.initial_adapter.empty()) {
    load_adapter(read_initial_adapter(config), model, weights, {.all = false});
    log_info(fmt::format("initial adapter: {}", config.lora.initial_adapter));
  }
  if (!loaded.ignored.empty()) log_info(fmt::format("not read from there: {}", brief_names(loaded.ignored)));
}

RunCheckpoints::RunCheckpoints(const config::TrainConfig& config, std::shared_ptr<Communicator> world,
                               LogFunction log_info, RunJob job)
    : config_(config.checkpoint),
      folder_(config::in_dump_folder(config, config.checkpoint.folder)),
      run_folder_(config.job.dump_folder),
      command_(hash_of_settings(config)),
      job_(std::move(job)),
      world_(std::move(world)),
      log_info_(std::move(log_info)) {}

bool RunCheckpoints::has_checkpoint() const {
  if (!config_.enable || config_.load_step >= 0) return config_.enable;
  bool found = false;
  on_first_rank(*world_, [&] { found = !list_checkpoints(folder_).complete.empty(); });
  return world_->broadcast_bytes(found ? "yes" : "") == "yes";
}

void RunCheckpoints::decide() { resumes_ = has_checkpoint(); }

/// Whether this command, or an earlier attempt of this job, has begun the branch that the folder is on.
bool RunCheckpoints::follows_its_branch() const {
  const auto branch = read_branch(folder_);
  if (!branch || branch->step != config_.load_step || !has_same_base(folder_, *branch)) return false;
  const auto steps = list_checkpoints(folder_).complete;
  if (steps.empty() || steps.front().step < branch->step) return false;
  const bool same_job =
      job_.is_restart && !job_.name.empty() && (branch->job == job_.name || branch->last_job == job_.name);
  if (!same_job && branch->command != command_ && branch->last_command != command_) return false;
  log_info_(fmt::format(
      "[checkpoint] load_step = {}: {} has begun its branch from there already, and goes on from its newest "
      "step{}",
      branch->step, same_job ? "an earlier attempt of this job" : "this command",
      same_job ? ""
               : fmt::format("; to begin another one, change a setting or remove {}",
                             (std::filesystem::path(folder_) / kBranchName).string())));
  return true;
}

/// On rank 0, after the state was loaded from there: so a checkpoint that cannot be loaded moves nothing.
void RunCheckpoints::begin_its_branch() {
  const SetAside aside = roll_back({.checkpoints = folder_, .run = run_folder_},
                                   {.step = config_.load_step, .command = command_, .job = job_.name});
  if (aside.names.empty()) return;
  log_info_(fmt::format("[checkpoint] load_step = {}: newer than that, and set aside in {}: {}", config_.load_step,
                        aside.into.string(), list_of_steps(aside.names)));
}

std::optional<std::int64_t> RunCheckpoints::load(TrainState& state, const LoadCheck& check) {
  if (!config_.enable) return std::nullopt;
  std::string chosen;  // by load_step; empty: the newest
  on_first_rank(*world_, [&] {
    check_can_save(folder_);
    if (const auto left = finish_rollback({.checkpoints = folder_, .run = run_folder_})) {
      log_info_(fmt::format("a rollback was interrupted, and is complete now; set aside in {}: {}", left->into.string(),
                            list_of_steps(left->names)));
    }
    if (config_.load_step >= 0 && !follows_its_branch()) chosen = chosen_step(folder_, config_.load_step).string();
  });
  chosen = world_->broadcast_bytes(chosen);
  require_one_folder(folder_, world_);
  manager_ =
      std::make_unique<CheckpointManager>(folder_,
                                          CheckpointOptions{.keep_latest_k = static_cast<int>(config_.keep_latest_k),
                                                            .convert_dtype = config_.convert_dtype},
                                          world_);
  if (config_.async_mode == "async") manager_->reserve(state);
  std::optional<LoadedCheckpoint> loaded;
  if (!chosen.empty()) {
    loaded = manager_->load(chosen, state, check);
    on_first_rank(*world_, [&] { begin_its_branch(); });
  } else {
    loaded = manager_->load_latest(state, check);
    on_first_rank(*world_,
                  [&] { config_.load_step < 0 ? forget_branch(folder_) : renew_branch(folder_, command_, job_.name); });
  }
  if (loaded.has_value() != resumes_) {
    throw CheckpointError(fmt::format(
        "{}: there {} when this run began, and now there {}: something else writes to the folder; start the run again",
        folder_, resumes_ ? "was a checkpoint" : "were no checkpoints", resumes_ ? "is none" : "is one"));
  }
  if (!loaded) return std::nullopt;
  saved_step_ = state.integers.at("step");
  log_info_(
      fmt::format("continuing from {} (step {}, {})", loaded->path.string(), saved_step_, human_bytes(loaded->bytes)));
  return saved_step_;
}

void RunCheckpoints::save(const TrainState& state, std::int64_t step, const std::string& metadata) {
  if (!manager_ || saved_step_ == step) return;
  const auto begin = Clock::now();
  if (config_.async_mode == "async") {
    manager_->async_save(state, step, metadata);
    log_info_(
        fmt::format("saving step {} while training goes on (waited {})", step, human_duration(elapsed_seconds(begin))));
  } else {
    const SavedCheckpoint saved = manager_->save(state, step, metadata);
    log_info_(fmt::format("saved {} ({}, {})", saved.path.string(), human_bytes(saved.bytes),
                          human_duration(elapsed_seconds(begin))));
  }
  saved_step_ = step;
}

void RunCheckpoints::finish() {
  if (!manager_) return;
  const auto begin = Clock::now();
  if (const auto saved = manager_->finish()) {
    log_info_(fmt::format("saved {} ({}, waited {})", saved->path.string(), human_bytes(saved->bytes),
                          human_duration(elapsed_seconds(begin))));
  }
}

}  // namespace phalanx::train
