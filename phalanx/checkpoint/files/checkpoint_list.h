// Lists the checkpoints in a folder and which of them are complete.
//
// A checkpoint is a directory step-N. `step-N.tmp` is one whose save or removal did not finish; it is never read.
// `step-N.replaced` is the former step-N during its replacement by another, and is as good as it. Steps that a rollback
// has begun to set aside (branch.h) do not count.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx {

struct FoundCheckpoint {
  std::filesystem::path path;
  std::int64_t step = 0;
  std::string damage = {};  // why it is not complete; empty: it is complete
};

struct CheckpointList {
  std::vector<FoundCheckpoint> complete;  // newest first: the manifest is intact, every file exists and has its size
  std::vector<FoundCheckpoint> damaged;   // step directories that are not complete
  std::vector<std::string> skipped;       // one line for each skipped directory, with the reason
};

/// Reads names, manifests and file sizes, not the tensors. A folder that does not exist has no checkpoints.
CheckpointList list_checkpoints(const std::filesystem::path& folder);

/// N of "step-N" and "step-N.replaced"; nothing for another name.
std::optional<std::int64_t> step_of_name(std::string_view name);

std::filesystem::path step_directory(const std::filesystem::path& folder, std::int64_t step);

/// The folder of checkpoints for `path`: `path` itself, or if it is a run's folder the subfolder that has complete
/// steps (CheckpointError if several have).
std::filesystem::path checkpoint_folder(const std::filesystem::path& path);

/// `path` itself if it is a step directory, else the newest complete step in the folder or run. Warns if a newer one is
/// damaged. Throws CheckpointError if there is none.
std::filesystem::path resolve_checkpoint(const std::filesystem::path& path);

}  // namespace phalanx
