// One save, from the first file to the rename that makes it exist: the steps between "what is to be written" and "it is
// on the disk". CheckpointManager runs it on the caller's thread, or on one of its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/rank_group.h"
#include "phalanx/checkpoint/save_plan.h"

namespace phalanx {

struct CheckpointOptions {
  int keep_latest_k = 0;              // 0 keeps all
  std::int64_t keep_every_steps = 0;  // checkpoints whose step this divides are never removed; 0: none
  // Loading: tensors of other types than those saved are converted. Else they are an error: a run that goes on is to be
  // exact. The masters of 16-bit parameters (optim/optimizer.h) come from parameters saved in float32, and go into
  // them.
  bool convert_dtype = false;
};

struct SavedCheckpoint {
  std::filesystem::path path;
  std::uint64_t bytes = 0;                     // of all ranks
  std::vector<std::filesystem::path> removed;  // by keep_latest_k; known on rank 0
};

class StepWriter {
 public:
  StepWriter(std::filesystem::path folder, CheckpointOptions options, FileSystem& fs);

  /// What every CheckpointError of a save begins and ends with.
  static std::string describe_failure(const std::filesystem::path& step_directory, const std::string& reason);
  /// Collective. Writes this rank's boxes; then rank 0 the manifest (step, integers and metadata of `manifest`, with
  /// the files of all), puts the step in place, and removes old ones. Earlier checkpoints are as they were if it fails.
  SavedCheckpoint write(const RankGroup& ranks, Manifest manifest, const std::vector<NamedTensor>& tensors,
                        const std::vector<WriteItem>& boxes) const;

 private:
  void prepare(const std::filesystem::path& temporary) const;
  void commit(const Manifest& manifest, const std::filesystem::path& temporary,
              const std::filesystem::path& final) const;
  std::vector<std::filesystem::path> remove_old(const std::filesystem::path& newest) const;
  void retire(const std::filesystem::path& directory) const;

  std::filesystem::path folder_;
  CheckpointOptions options_;
  FileSystem& fs_;
};

}  // namespace phalanx
