#include "phalanx/checkpoint/checkpoint_manager.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/checkpoint/checkpoint_list.h"
#include "phalanx/checkpoint/checkpoint_reader.h"
#include "phalanx/checkpoint/mismatch.h"
#include "phalanx/checkpoint/save_plan.h"
#include "phalanx/checkpoint/saved_state.h"
#include "phalanx/checkpoint/shard_plan.h"
#include "phalanx/comm/communicator.h"

namespace phalanx {
namespace {

std::filesystem::path with_suffix(std::filesystem::path path, const char* suffix) { return path += suffix; }

bool is_there(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

bool is_complete(const std::filesystem::path& directory) {
  try {
    read_step_manifest(directory);
    return true;
  } catch (const DamagedError&) {
    return false;
  }
}

constexpr const char* kAdvice =
    "go on with the model and the optimizer that it was saved with, or keep this run's checkpoints in another folder";

// Notes that ranks exchange: what became of a piece of work.
constexpr char kDone = '+', kDamaged = '?', kFailed = '-';

std::string run_and_note(const std::function<std::string()>& work) {
  try {
    return kDone + work();
  } catch (const DamagedError& error) {
    return kDamaged + std::string(error.what());
  } catch (const std::exception& error) {  // whatever it is, the other ranks must hear of it
    return kFailed + std::string(error.what());
  }
}

}  // namespace

CheckpointManager::CheckpointManager(std::filesystem::path folder, CheckpointOptions options,
                                     std::shared_ptr<Communicator> comm, FileSystem& fs)
    : folder_(std::move(folder)), options_(options), comm_(std::move(comm)), fs_(fs) {
  if (options_.keep_latest_k < 0 || options_.keep_every_steps < 0)
    throw ConfigError(
        fmt::format("checkpoints: keep_latest_k is {} and keep_every_steps {}: expected 0 (keep all) or more",
                    options_.keep_latest_k, options_.keep_every_steps));
  if (comm_) {
    rank_ = comm_->rank();
    world_size_ = comm_->size();
  }
}

/// Runs `work` on every rank and returns all results; if it fails on any rank, throws the same error on all.
std::vector<std::string> CheckpointManager::together(const std::function<std::string()>& work) {
  if (world_size_ == 1) return {work()};
  auto notes = comm_->all_gather_bytes(run_and_note(work));
  const bool is_shared = std::ranges::all_of(notes, [&](const auto& note) { return note == notes[0]; });
  // What is wrong with the request itself comes before what is wrong with the files.
  for (const char outcome : {kFailed, kDamaged}) {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (notes[rank].front() != outcome) continue;
      // Who it was says nothing where all say the same.
      const auto message = is_shared ? notes[rank].substr(1) : fmt::format("rank {}: {}", rank, notes[rank].substr(1));
      if (outcome == kDamaged) throw DamagedError(message);
      throw CheckpointError(message);
    }
  }
  for (auto& note : notes) note.erase(0, 1);
  return notes;
}

SavedCheckpoint CheckpointManager::save(const TrainState& state, std::int64_t step, const std::string& metadata) {
  const auto final = step_directory(folder_, step), temporary = with_suffix(final, ".tmp");
  SavedCheckpoint saved{.path = final};
  try {
    const auto notes = together([&] {
      auto mine = make_save_note(state, step);
      if (rank_ == 0) prepare(temporary);
      return mine;
    });
    const auto entries = together([&] {
      const auto boxes = plan_save(state.tensors, notes, rank_);
      return format_manifest_file(write_shard_file(fs_, temporary / shard_file_name(rank_), state.tensors, boxes));
    });
    Manifest manifest{.step = step, .integers = state.integers, .metadata = metadata};
    for (const auto& entry : entries) {
      manifest.files.push_back(parse_manifest_file(entry));
      saved.bytes += manifest.files.back().size;
    }
    together([&] {
      if (rank_ == 0) commit(manifest, temporary, final);
      return std::string();
    });
  } catch (const CommError&) {
    throw;  // the ranks cannot talk any more: nothing to add
  } catch (const Error& error) {
    if (rank_ == 0) {
      try {
        fs_.remove_all(temporary);
      } catch (const std::exception&) {  // the next save clears it
      }
    }
    throw CheckpointError(fmt::format("cannot save checkpoint {}: {} (earlier checkpoints are as they were)",
                                      final.string(), error.what()));
  }
  if (rank_ == 0) saved.removed = remove_old(final);
  return saved;
}

/// Rank 0: clears what unfinished saves and removals left behind, and makes the directory to write to.
void CheckpointManager::prepare(const std::filesystem::path& temporary) {
  fs_.make_directory(folder_);
  std::vector<std::filesystem::path> leftovers;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with("step-") && name.ends_with(".tmp")) leftovers.push_back(entry.path());
  }
  if (error) throw CheckpointError(fmt::format("cannot list {}: {}", folder_.string(), error.message()));
  for (const auto& path : leftovers) fs_.remove_all(path);
  fs_.make_directory(temporary);
}

/// Rank 0: the manifest, then everything onto the disk, then the rename that makes the checkpoint exist.
void CheckpointManager::commit(const Manifest& manifest, const std::filesystem::path& temporary,
                               const std::filesystem::path& final) {
  auto file = fs_.create(temporary / kManifestName);
  file->write(format_manifest(manifest));
  file->sync();
  file->close();
  fs_.sync_directory(temporary);
  const auto replaced = with_suffix(final, ".replaced");
  if (is_there(final)) {
    // Between the two renames the former step-N is found under its other name (checkpoint_list.h).
    if (is_complete(final) || !is_there(replaced)) {
      if (is_there(replaced)) retire(replaced);
      fs_.rename(final, replaced);
    } else {
      retire(final);
    }
  }
  fs_.rename(temporary, final);
  fs_.sync_directory(folder_);
  if (is_there(replaced)) retire(replaced);
}

/// Removes a checkpoint so that an interruption leaves no half of one under its name.
void CheckpointManager::retire(const std::filesystem::path& directory) {
  const auto doomed = with_suffix(directory, ".removed.tmp");
  fs_.remove_all(doomed);
  fs_.rename(directory, doomed);
  fs_.remove_all(doomed);
}

std::vector<std::filesystem::path> CheckpointManager::remove_old(const std::filesystem::path& newest) {
  std::vector<std::filesystem::path> removed;
  if (options_.keep_latest_k == 0) return removed;
  int kept = 1;  // the one just saved, even where the folder holds later steps of an abandoned branch
  for (const auto& [path, step] : list_checkpoints(folder_).complete) {
    if (path == newest) continue;
    if (options_.keep_every_steps > 0 && step % options_.keep_every_steps == 0) continue;
    if (kept++ < options_.keep_latest_k) continue;
    try {
      retire(path);
      removed.push_back(path);
    } catch (const Error& error) {  // the new checkpoint is safe: training goes on
      log::warn(fmt::format("cannot remove the old checkpoint {}: {}", path.string(), error.what()));
    }
  }
  return removed;
}

LoadedCheckpoint CheckpointManager::read(const std::filesystem::path& step_directory, TrainState& state) const {
  const CheckpointReader reader(step_directory);
  const auto& integers = reader.manifest().integers;
  Mismatches mismatches;
  for (const auto& [name, value] : state.integers) {
    if (!integers.contains(name)) mismatches.other(fmt::format("the integer \"{}\" is missing", name));
  }
  mismatches.throw_if_any(fmt::format("checkpoint {} does not fit this run", step_directory.string()), kAdvice);
  LoadedCheckpoint loaded{
      .path = step_directory, .step = reader.manifest().step, .metadata = reader.manifest().metadata};
  const auto bytes = reader.read(state.tensors, {.advice = kAdvice});
  loaded.bytes = bytes.taken;
  loaded.verified_bytes = bytes.verified;
  state.integers = integers;
  return loaded;
}

LoadedCheckpoint CheckpointManager::load(const std::filesystem::path& step_directory, TrainState& state) {
  LoadedCheckpoint loaded;
  together([&] {
    loaded = read(step_directory, state);
    return std::string();
  });
  return loaded;
}

std::optional<LoadedCheckpoint> CheckpointManager::load_latest(TrainState& state) {
  // Rank 0 looks, so that all ranks try the same directories in the same order.
  const auto found = nlohmann::json::parse(together([&] {
    auto json = nlohmann::json::object({{"complete", nlohmann::json::array()}, {"skipped", nlohmann::json::array()}});
    if (rank_ == 0) {
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
      loaded = load(folder_ / name.get<std::string>(), state);
      break;
    } catch (const DamagedError& error) {
      skipped.push_back(fmt::format("{}: {}", name.get<std::string>(), error.what()));
    }
  }
  const bool is_hopeless = !loaded && (!found["complete"].empty() || found["damaged"].get<std::size_t>() > 0);
  if (!is_hopeless) {  // else the error says all of it
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
