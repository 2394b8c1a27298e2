#include "phalanx/checkpoint/checkpoint_manager.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/base/start_thread.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/files/mismatch.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/save_plan.h"
#include "phalanx/comm/communicator.h"

namespace phalanx {
namespace {

constexpr const char* kAdvice =
    "go on with the model and the optimizer that it was saved with, or keep this run's checkpoints in another folder; "
    "convert_dtype = true (in [checkpoint], or in CheckpointOptions) converts tensors that differ in their type alone";

}  // namespace

CheckpointManager::CheckpointManager(std::filesystem::path folder, CheckpointOptions options,
                                     std::shared_ptr<Communicator> comm, FileSystem& fs)
    : folder_(std::move(folder)),
      writer_(folder_, options, fs),
      ranks_(std::move(comm)),
      convert_dtype_(options.convert_dtype) {
  if (options.keep_latest_k < 0 || options.keep_every_steps < 0)
    throw ConfigError(
        fmt::format("checkpoints: keep_latest_k is {} and keep_every_steps {}: expected 0 (keep all) or more",
                    options.keep_latest_k, options.keep_every_steps));
}

CheckpointManager::~CheckpointManager() {
  try {
    finish();
  } catch (const std::exception& error) {  // no caller is left to throw to
    log::error(error.what());
  }
}

std::vector<WriteItem> CheckpointManager::plan(const TrainState& state, std::int64_t step) const {
  try {
    const auto local_plans = ranks_.run_collectively([&] { return create_local_plan(state, step); });
    std::vector<WriteItem> boxes;
    ranks_.run_collectively([&] {
      boxes = plan_save(state.tensors, local_plans, ranks_.rank());
      return std::string();
    });
    return boxes;
  } catch (const CommError&) {
    throw;  // the ranks cannot communicate any more: nothing to add
  } catch (const Error& error) {
    throw CheckpointError(StepWriter::describe_failure(step_directory(folder_, step), error.what()));
  }
}

SavedCheckpoint CheckpointManager::save(const TrainState& state, std::int64_t step, const std::string& metadata) {
  finish();
  const auto boxes = plan(state, step);
  return writer_.write(ranks_, {.step = step, .integers = state.integers, .metadata = metadata, .files = {}},
                       state.tensors, boxes);
}

StartedSave CheckpointManager::async_save(const TrainState& state, std::int64_t step, const std::string& metadata) {
  const auto begin = std::chrono::steady_clock::now();
  finish();
  const auto boxes = plan(state, step);
  if (!background_ranks_) background_ranks_ = ranks_.split();
  StartedSave started{.path = step_directory(folder_, step)};
  StagedBoxes staged;
  ranks_.run_collectively([&] {  // a rank without memory must not leave the others waiting
    staged = staging_.copy(state.tensors, boxes);
    return std::string();
  });
  started.bytes = staged.bytes;
  Manifest manifest{.step = step, .integers = state.integers, .metadata = metadata, .files = {}};
  // The thread uses nothing of this object except the staging buffer's memory, which stays until finish() has returned.
  save_future_ = starting("the writing of a checkpoint", [&] {
    return std::async(std::launch::async, [writer = writer_, ranks = *background_ranks_, manifest = std::move(manifest),
                                           staged = std::move(staged)] {
      return writer.write(ranks, manifest, staged.tensors, staged.boxes, [&] { staged.await_copies(); });
    });
  });
  started.stall_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return started;
}

void CheckpointManager::reserve(const TrainState& state) {
  finish();
  const auto boxes = plan(state, 0);
  if (!background_ranks_) background_ranks_ = ranks_.split();
  ranks_.run_collectively([&] {
    staging_.reserve(state.tensors, boxes);
    return std::string();
  });
}

std::optional<SavedCheckpoint> CheckpointManager::finish() {
  if (!save_future_.valid()) return std::nullopt;
  return save_future_.get();
}

bool CheckpointManager::is_saving() const { return save_future_.valid() && !has_ended(); }

bool CheckpointManager::has_ended() const {
  return save_future_.valid() && save_future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

LoadedCheckpoint CheckpointManager::read(const CheckpointReader& reader, TrainState& state,
                                         const LoadCheck& check) const {
  const std::filesystem::path& step_directory = reader.folder();
  if (check) check(step_directory, reader.manifest());
  const auto& integers = reader.manifest().integers;
  Mismatches mismatches;
  for (const auto& [name, value] : state.integers) {
    if (!integers.contains(name)) mismatches.other(fmt::format("the integer \"{}\" is missing", name));
  }
  mismatches.throw_if_any(fmt::format("checkpoint {} does not fit this run", step_directory.string()), kAdvice);
  LoadedCheckpoint loaded{
      .path = step_directory, .step = reader.manifest().step, .metadata = reader.manifest().metadata};
  const auto bytes = reader.read(state.tensors, {.convert_dtype = convert_dtype_, .advice = kAdvice});
  loaded.bytes = bytes.taken;
  loaded.verified_bytes = bytes.verified;
  state.integers = integers;
  return loaded;
}

LoadedCheckpoint CheckpointManager::load(const std::filesystem::path& step_directory, TrainState& state,
                                         const LoadCheck& check) {
  finish();
  std::optional<CheckpointReader> reader;
  const auto hashes = ranks_.run_collectively([&] {
    reader.emplace(step_directory);
    return hash_of_text(format_manifest(reader->manifest()));
  });
  const auto other = std::ranges::find_if(hashes, [&](const std::string& hash) { return hash != hashes[0]; });
  if (other != hashes.end()) {
    throw CheckpointError(fmt::format(
        "checkpoint {} is another one on rank {} than on rank 0 (hashes of their manifests: {} and {}): expected one "
        "folder that all ranks share, or copies of one checkpoint",
        step_directory.string(), other - hashes.begin(), *other, hashes[0]));
  }
  LoadedCheckpoint loaded;
  ranks_.run_collectively([&] {
    loaded = read(*reader, state, check);
    return std::string();
  });
  return loaded;
}

std::optional<LoadedCheckpoint> CheckpointManager::load_latest(TrainState& state, const LoadCheck& check) {
  finish();
  // Rank 0 lists the folder, so that all ranks try the same directories in the same order.
  const auto found = nlohmann::json::parse(ranks_.run_collectively([&] {
    auto json = nlohmann::json::object({{"complete", nlohmann::json::array()}, {"skipped", nlohmann::json::array()}});
    if (ranks_.rank() == 0) {
      const auto list = list_checkpoints(folder_);
      for (const auto& checkpoint : list.complete) json["complete"].push_back(checkpoint.path.filename().string());
      json["skipped"] = list.skipped;
      json["damaged"] = list.damaged.size();
    }
    return json.dump();
  })[0]);
  auto skipped = found["skipped"].get<std::vector<std::string>>();
  std::optional<LoadedCheckpoint> loaded;
  for (const auto& name : found["complete"]) {
    try {
      loaded = load(folder_ / name.get<std::string>(), state, check);
      break;
    } catch (const DamagedError& error) {
      skipped.push_back(fmt::format("{}: {}", name.get<std::string>(), error.what()));
    }
  }
  const bool is_hopeless = !loaded && (!found["complete"].empty() || found["damaged"].get<std::size_t>() > 0);
  if (!is_hopeless) {  // else the error says everything
    for (const auto& line : skipped) log::warn_once(fmt::format("checkpoint skipped: {}", line));
  }
  if (loaded) {
    loaded->skipped = std::move(skipped);
  } else if (is_hopeless) {
    std::string reasons;
    for (const auto& line : skipped) reasons += "\n  " + line;
    throw CheckpointError(fmt::format(
        "no checkpoint in {} can be loaded; move them away to start from the beginning:{}", folder_.string(), reasons));
  }
  return loaded;
}

}  // namespace phalanx
