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
// All calls are collective over the communicator and, but for async_save(), synchronous. All ranks list the same names
// in the same order. A replicated tensor has the same values on every rank, and each writes an even share of it; of a
// tensor with a shard the first holder of each box writes it; a partial one is refused. The folder must be visible to
// all ranks.
//
//   CheckpointManager checkpoints("run/checkpoint", {.keep_latest_k = 3}, comm);
//   if (auto loaded = checkpoints.load_latest(state)) step = state.integers.at("step");
//   checkpoints.save(state, step, R"({"model": {"dim": 256}})");
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/rank_group.h"
#include "phalanx/checkpoint/staging_buffer.h"
#include "phalanx/checkpoint/step_writer.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {

class CheckpointReader;
class Communicator;

/// A save that goes on in the background.
struct StartedSave {
  std::filesystem::path path;  // where it will be
  std::uint64_t bytes = 0;     // that this rank copied
  double stall_seconds = 0;    // how long the caller was held up: an earlier save's end, the plan and the copy
};

struct LoadedCheckpoint {
  std::filesystem::path path;
  std::int64_t step = 0;
  std::string metadata;              // the JSON object given to save()
  std::uint64_t bytes = 0;           // that this rank's tensors took
  std::uint64_t verified_bytes = 0;  // of the blocks that this rank read and checked for them
  std::vector<std::string> skipped;  // newer ones passed over, and why
};

/// Looks at a checkpoint, on every rank, before anything of it is loaded. What it throws is the load's error, and the
/// state is as it was; no older checkpoint is taken in its place.
using LoadCheck = std::function<void(const std::filesystem::path& step_directory, const Manifest& manifest)>;

class CheckpointManager {
 public:
  /// Without a communicator this process is the only rank. `fs` must outlive the manager.
  CheckpointManager(std::filesystem::path folder, CheckpointOptions options = {},
                    std::shared_ptr<Communicator> comm = nullptr, FileSystem& fs = posix_file_system());
  ~CheckpointManager();  // waits for a save under way; a failure that nobody has asked for is logged
  CheckpointManager(CheckpointManager&&) = delete;

  /// An existing step-N is replaced. `metadata` is rank 0's JSON object, kept in the manifest.
  SavedCheckpoint save(const TrainState& state, std::int64_t step, const std::string& metadata = "{}");

  /// Nothing if the folder has no checkpoints. CheckpointError if it has but none is sound, or the newest sound one is
  /// of another model: starting from scratch must then be the user's decision.
  std::optional<LoadedCheckpoint> load_latest(TrainState& state, const LoadCheck& check = {});
  /// One particular step directory. Names, shapes, dtypes and integers are compared before any tensor is overwritten.
  LoadedCheckpoint load(const std::filesystem::path& step_directory, TrainState& state, const LoadCheck& check = {});

  /// As save(), but returns when the state has been copied, which may then be changed; a thread of this object's own
  /// writes the copy, and talks to the other ranks over a communicator of its own (made by the first call).
  /// A failure of it is thrown, on all ranks, by the next call of any method here but folder(), is_saving() and
  /// has_ended(), which then does nothing else: whoever wants it at once asks finish(). The copy takes as much host
  /// memory as this rank writes, kept for the next save.
  StartedSave async_save(const TrainState& state, std::int64_t step, const std::string& metadata = "{}");
  /// For who saves asynchronously: makes the memory for the copies at start-up, rather than within the first
  /// async_save(), which would take several times as long as later ones.
  void reserve(const TrainState& state);
  /// Waits for the save under way: what became of it, or its failure. Nothing if there is none.
  std::optional<SavedCheckpoint> finish();
  bool is_saving() const;  // this rank's part; never blocks
  /// This rank's part has ended, and finish() will tell without waiting for it; never blocks.
  bool has_ended() const;

  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::vector<WriteItem> plan(const TrainState& state, std::int64_t step) const;
  LoadedCheckpoint read(const CheckpointReader& reader, TrainState& state, const LoadCheck& check) const;

  std::filesystem::path folder_;
  StepWriter writer_;
  RankGroup ranks_;
  bool convert_dtype_;
  std::optional<RankGroup> background_ranks_;
  StagingBuffer staging_;
  std::future<SavedCheckpoint> save_future_;  // destroyed first: waits for the thread that reads the staging buffer
};

}  // namespace phalanx
