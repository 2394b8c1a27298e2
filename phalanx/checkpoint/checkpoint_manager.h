// CheckpointManager saves and loads the whole state of a training run, as step directories in one folder.
//
//   folder/step-100/shard-00001-model-00001-of-00001.safetensors   one per rank: its boxes of the tensors
//          step-100/manifest.json                                   sizes, hashes, integers; written last
//
// Guarantees
// - A save is all or nothing. Everything is written to step-N.tmp and synced to disk, the manifest last. Then one
//   rename makes it step-N. If the process is killed at any moment, or the disk is full, earlier checkpoints are
//   unchanged.
// - Every byte is hashed. load_latest() verifies what it reads. It skips a damaged checkpoint in favour of an older
//   one, and logs one line for each that it skips.
// - All ranks see the same outcome: a failure on one rank is a CheckpointError on every rank, naming the rank.
// - keep_latest_k removes old checkpoints only after the new one is in place.
// - Any layout loads into any other: another number of ranks, another mesh, other placements. Global names, shapes and
//   dtypes must agree. A tensor with a shard (tensor/named.h) is filled only with its own box, from whichever ranks
//   have saved it.
//
// REQUIRES: all ranks list the same names in the same order, and the folder is visible to all ranks.
//
// All calls are collective over the communicator and, except async_save(), synchronous. A replicated tensor has the
// same values on every rank; each rank writes an even share of it. For a tensor with a shard, the first holder of each
// box writes it. A partial tensor is refused.
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

/// A save that continues in the background.
struct StartedSave {
  std::filesystem::path path;  // where the checkpoint will be
  std::uint64_t bytes = 0;     // that this rank copied
  double stall_seconds = 0;    // how long the caller was blocked: the end of an earlier save, the plan and the copy
};

struct LoadedCheckpoint {
  std::filesystem::path path;
  std::int64_t step = 0;
  std::string metadata;              // the JSON object given to save()
  std::uint64_t bytes = 0;           // read into this rank's tensors
  std::uint64_t verified_bytes = 0;  // of the blocks that this rank read and checked for them
  std::vector<std::string> skipped;  // newer checkpoints that were skipped, and why
};

/// Called with a checkpoint, on every rank, before anything of it is loaded. If it throws, the load throws that error
/// and the state is unchanged; no older checkpoint is loaded instead.
using LoadCheck = std::function<void(const std::filesystem::path& step_directory, const Manifest& manifest)>;

class CheckpointManager {
 public:
  /// Without a communicator this process is the only rank.
  /// REQUIRES: `fs` outlives the manager.
  CheckpointManager(std::filesystem::path folder, CheckpointOptions options = {},
                    std::shared_ptr<Communicator> comm = nullptr, FileSystem& fs = posix_file_system());
  ~CheckpointManager();  // waits for a save in flight; a failure that no call has thrown is logged
  CheckpointManager(CheckpointManager&&) = delete;

  /// Replaces an existing step-N. `metadata` is rank 0's JSON object, stored in the manifest.
  SavedCheckpoint save(const TrainState& state, std::int64_t step, const std::string& metadata = "{}");

  /// Returns nothing if the folder has no checkpoints. Throws CheckpointError if it has some but none is intact, or if
  /// the newest intact one is of another model: to start from scratch must then be the user's decision.
  std::optional<LoadedCheckpoint> load_latest(TrainState& state, const LoadCheck& check = {});
  /// Loads one step directory. Names, shapes, dtypes and integers are compared before any tensor is overwritten.
  LoadedCheckpoint load(const std::filesystem::path& step_directory, TrainState& state, const LoadCheck& check = {});

  /// Like save(), but returns when the state has been copied. The caller may then change the state. From a device the
  /// copies are only queued, on its current stream, and the caller may change the state by what it queues there. A
  /// thread of this object writes the copy, over a separate communicator, which the first call makes. The copy takes as
  /// much host memory as this rank writes, for what is on a device up to twice as much; the next save reuses it.
  ///
  /// If the write fails, the next call of any method except folder(), is_saving() and has_ended() throws the error on
  /// all ranks, and does nothing else. Call finish() to get the error at once.
  StartedSave async_save(const TrainState& state, std::int64_t step, const std::string& metadata = "{}");
  /// Allocates the memory for the copies of async_save(), at start-up. Without it the first async_save() allocates, and
  /// takes several times as long as later ones.
  void reserve(const TrainState& state);
  /// Waits for the save in flight. Returns its result or throws its error; returns nothing if there is no save.
  std::optional<SavedCheckpoint> finish();
  bool is_saving() const;  // this rank's part; never blocks
  /// Whether this rank's part has ended, so that finish() will not wait for it. Never blocks.
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
