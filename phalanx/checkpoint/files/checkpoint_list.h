// Finds the checkpoints in a folder and says which are whole.
//
// A checkpoint is a directory step-N. `step-N.tmp` is one whose saving or removal did not finish, never read again;
// `step-N.replaced` is the former step-N for the moment in which another takes its place, and as good as it. Steps that
// a rollback has begun to set aside (branch.h) are none.
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
  std::string damage = {};  // why it is not complete; empty: it is
};

struct CheckpointList {
  std::vector<FoundCheckpoint> complete;  // newest first: manifest sound, every file there in its size
  std::vector<FoundCheckpoint> damaged;   // step directories that are not complete
  std::vector<std::string> skipped;       // one line for each directory passed over, with the reason
};

/// Reads names, manifests and file sizes, not the tensors. A folder that does not exist has no checkpoints.
CheckpointList list_checkpoints(const std::filesystem::path& folder);

/// N of "step-N" and "step-N.replaced"; nothing for another name.
std::optional<std::int64_t> step_of_name(std::string_view name);

std::filesystem::path step_directory(const std::filesystem::path& folder, std::int64_t step);

/// The folder of checkpoints that is meant by `path`: itself, or where it is a run's folder the one below that has
/// complete steps (CheckpointError where several have).
std::filesystem::path checkpoint_folder(const std::filesystem::path& path);

/// `path` itself if it is a step directory, else the newest complete one in the folder or run, with a warning where a
/// newer one is damaged; CheckpointError if there is none.
std::filesystem::path resolve_checkpoint(const std::filesystem::path& path);

}  // namespace phalanx
