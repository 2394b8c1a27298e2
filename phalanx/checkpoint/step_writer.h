// StepWriter does one save, from the first file to the rename that makes the step directory exist. CheckpointManager
// runs it on the caller's thread, or on its own background thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/manifest.h"
#include "phalanx/checkpoint/rank_group.h"
#include "phalanx/checkpoint/save_plan.h"

namespace phalanx {

struct CheckpointOptions {
  int keep_latest_k = 0;              // 0 keeps all
  std::int64_t keep_every_steps = 0;  // checkpoints whose step this divides are never removed; 0: none
  // For loading: convert tensors whose saved dtype differs. Else they are an error: a resumed run must be exact. The
  // master weights of 16-bit parameters (optim/optimizer.h) are converted from parameters saved in float32, and to
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

  /// The text of every CheckpointError of a save, around the reason.
  static std::string describe_failure(const std::filesystem::path& step_directory, const std::string& reason);
  /// Collective. Writes this rank's boxes. Then rank 0 writes the manifest (step, integers and metadata of `manifest`,
  /// with the files of all ranks), renames the step into place, and removes old steps. `await_tensors` returns when the
  /// tensors may be read.
  /// ENSURES: if it fails, earlier checkpoints are unchanged.
  SavedCheckpoint write(const RankGroup& ranks, Manifest manifest, const std::vector<NamedTensor>& tensors,
                        const std::vector<WriteItem>& boxes, const std::function<void()>& await_tensors = {}) const;

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
