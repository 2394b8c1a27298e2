// A branch of a run, which [checkpoint] load_step begins: newer steps are set aside, so that the next steps follow
// load_step.
//
//   FOLDER/branch.json               the step that the branch began from, and the command that asked for it
//   FOLDER/abandoned-1/step-120      a step that was newer then; a checkpoint folder like any other
//
// It is crash-safe at every file operation. First branch.json, replaced in one rename, names what is to be set aside;
// then the steps are renamed. Before the first rename nothing has changed. After it list_checkpoints() skips the named
// steps, so that every reader follows the branch, and finish_branch() completes an interrupted begin_branch().
//
//   begin_branch(folder, {.step = 100, .command = hash, .job = "..."});
//   const auto branch = read_branch(folder);             // in a later command, to see whether it asks for the same
//
// Only one process at a time may call (train/run_lock.h). It does not use torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/file.h"

namespace phalanx {

inline constexpr const char* kBranchName = "branch.json";

struct Branch {
  std::int64_t step = 0;                          // where the branch began
  double time = 0;                                // when, in seconds since the epoch; set by begin_branch()
  std::string command = {};                       // the command that asked for it: the hash of its settings
  std::string job = {};                           // the launcher's or scheduler's job of that command; empty: none
  std::string last_command = {};                  // the last command that continued it, if it was another one
  std::string last_job = {};                      // the job of that command
  std::string base = {};                          // identifies the state of step-N; set by begin_branch()
  std::string set_aside_in = {};                  // "abandoned-1"; empty: there were no newer steps
  std::vector<std::string> being_set_aside = {};  // names; empty when all are set aside
};

struct SetAside {
  std::vector<std::string> names;  // "step-120", ascending
  std::filesystem::path into;
};

/// Returns nothing if there is no branch. Throws CheckpointError if the file is malformed.
std::optional<Branch> read_branch(const std::filesystem::path& folder);

/// Stores other data that belongs to the steps being set aside (branch.being_set_aside) in the folder `into`, and
/// records them. It is called before branch.json says that all is done, and again after an interruption.
using KeepBeside = std::function<void(const std::filesystem::path& into, const Branch& branch)>;

/// Begins a branch from step-`branch.step`. Returns what was set aside.
/// REQUIRES: that step exists.
SetAside begin_branch(const std::filesystem::path& folder, Branch branch, FileSystem& fs = posix_file_system(),
                      const KeepBeside& keep = {});
/// Completes an interrupted begin_branch(). Returns everything it set aside, before and now.
SetAside finish_branch(const std::filesystem::path& folder, FileSystem& fs = posix_file_system(),
                       const KeepBeside& keep = {});
/// Records that this command, of this job, continues the branch. Without a job (empty) the recorded job does not
/// change.
void renew_branch(const std::filesystem::path& folder, const std::string& command, const std::string& job,
                  FileSystem& fs = posix_file_system());
/// For a command that asks for no branch and continues from the newest step: the next command that asks for a branch
/// begins it anew.
void forget_branch(const std::filesystem::path& folder, FileSystem& fs = posix_file_system());

/// Whether step-`branch.step` is still the state that the branch began from, or no longer exists (keep_latest_k).
bool has_same_base(const std::filesystem::path& folder, const Branch& branch);

}  // namespace phalanx
