// Saves and loads the whole state of a training run as step directories in one folder.
//
//   folder/step-100/shard-00001-model-00001-of-00001.safetensors   one per rank: its boxes of the tensors
//          step-100/manifest.json                                   sizes, hashes, integers; written last
//
// Guarantees
// - A save is all or nothing. Everything goes to step-N.tmp and onto the disk, the manifest last; then one rename makes
//   it step-N. Killed at any moment, or out of space, the folder's earlier checkpoints are as they were.
// - Every byte is hashed; load_latest() verifies what it reads and passes over a damaged checkpoint for an older one,
//   logging one line for each that it skips.
// - All ranks see the same outcome: a failure on one is a CheckpointError on every one, naming the rank.
// - keep_latest_k removes old checkpoints only after the new one is in place.
//
// - Any layout loads into any other: other ranks, another mesh, other placements. Global names, shapes and dtypes must
//   agree; a tensor with a shard (tensor/named.h) takes the bytes of its own box only, whoever has saved them.
//
// All calls are collective over the communicator and synchronous. All ranks list the same names in the same order. A
// replicated tensor has the same values on every rank, and each writes an even share of it; of a tensor with a shard
// the first holder of each box writes it; a partial one is refused. The folder must be visible to all ranks.
//
//   CheckpointManager checkpoints("run/checkpoint", {.keep_latest_k = 3}, comm);
//   if (auto loaded = checkpoints.load_latest(state)) step = state.integers.at("step");
//   checkpoints.save(state, step, R"({"model": {"dim": 256}})");
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/manifest.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {

class Communicator;

struct CheckpointOptions {
  int keep_latest_k = 0;              // 0 keeps all
  std::int64_t keep_every_steps = 0;  // checkpoints whose step this divides are never removed; 0: none
};

struct SavedCheckpoint {
  std::filesystem::path path;
  std::uint64_t bytes = 0;                     // of all ranks
  std::vector<std::filesystem::path> removed;  // by keep_latest_k; known on rank 0
};

struct LoadedCheckpoint {
  std::filesystem::path path;
  std::int64_t step = 0;
  std::string metadata;              // the JSON object given to save()
  std::uint64_t bytes = 0;           // that this rank's tensors took
  std::uint64_t verified_bytes = 0;  // of the blocks that this rank read and checked for them
  std::vector<std::string> skipped;  // newer ones passed over, and why
};

class CheckpointManager {
 public:
  /// Without a communicator this process is the only rank. `fs` must outlive the manager.
  CheckpointManager(std::filesystem::path folder, CheckpointOptions options = {},
                    std::shared_ptr<Communicator> comm = nullptr, FileSystem& fs = posix_file_system());

  /// An existing step-N is replaced. `metadata` is rank 0's JSON object, kept in the manifest.
  SavedCheckpoint save(const TrainState& state, std::int64_t step, const std::string& metadata = "{}");

  /// Nothing if the folder has no checkpoints. CheckpointError if it has but none is sound, or the newest sound one is
  /// of another model: starting from scratch must then be the user's decision.
  std::optional<LoadedCheckpoint> load_latest(TrainState& state);
  /// One particular step directory. Names, shapes, dtypes and integers are compared before any tensor is overwritten.
  LoadedCheckpoint load(const std::filesystem::path& step_directory, TrainState& state);

  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::vector<std::string> together(const std::function<std::string()>& work);
  void prepare(const std::filesystem::path& temporary);
  void commit(const Manifest& manifest, const std::filesystem::path& temporary, const std::filesystem::path& final);
  std::vector<std::filesystem::path> remove_old(const std::filesystem::path& newest);
  void retire(const std::filesystem::path& directory);
  LoadedCheckpoint read(const std::filesystem::path& step_directory, TrainState& state) const;

  std::filesystem::path folder_;
  CheckpointOptions options_;
  std::shared_ptr<Communicator> comm_;
  FileSystem& fs_;
  int rank_ = 0;
  int world_size_ = 1;
};

}  // namespace phalanx
