// The branch of a run that [checkpoint] load_step begins: newer steps are set aside, so that what comes next follows
// it.
//
//   FOLDER/branch.json               which step it began from, and what asked for it
//   FOLDER/abandoned-1/step-120      a step that was newer then; a checkpoint folder like any other
//
// Crash-safe at every file operation: branch.json, replaced in one rename, first names what is to be set aside, then
// the renames follow. From that rename on list_checkpoints() passes over what it names, so that every reader follows
// the branch; finish_branch() does what an interruption has left. Before it, nothing has changed.
//
//   begin_branch(folder, {.step = 100, .command = hash, .job = "..."});
//   const auto branch = read_branch(folder);             // of a later command, to see whether it asks for the same
//
// One process at a time calls (train/run_lock.h). Knows no torch.
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
  std::int64_t step = 0;                          // it began from
  double time = 0;                                // when, in seconds since the epoch; filled in by begin_branch()
  std::string command = {};                       // what asked for it: the hash of its settings
  std::string job = {};                           // which launcher's or scheduler's job did; empty: none
  std::string last_command = {};                  // what went on with it last, where that was another one
  std::string last_job = {};                      // likewise
  std::string base = {};                          // which state step-N was; filled in by begin_branch()
  std::string set_aside_in = {};                  // "abandoned-1"; empty: there were no newer steps
  std::vector<std::string> being_set_aside = {};  // names; empty when that is done
};

struct SetAside {
  std::vector<std::string> names;  // "step-120", ascending
  std::filesystem::path into;
};

/// CheckpointError where the file is malformed.
std::optional<Branch> read_branch(const std::filesystem::path& folder);

/// Puts beside the steps that were set aside, in the folder that it is given, what else belongs to them, and records
/// them (branch.being_set_aside). Called before branch.json says that all is done; after an interruption once more.
using KeepBeside = std::function<void(const std::filesystem::path& into, const Branch& branch)>;

/// Begins a branch from step-`branch.step`, which must be there. Returns what was set aside.
SetAside begin_branch(const std::filesystem::path& folder, Branch branch, FileSystem& fs = posix_file_system(),
                      const KeepBeside& keep = {});
/// Completes one whose beginning was interrupted. Returns all that it set aside, before and now.
SetAside finish_branch(const std::filesystem::path& folder, FileSystem& fs = posix_file_system(),
                       const KeepBeside& keep = {});
/// The branch is gone on with by this command, of this job (empty: of none, which changes nothing).
void renew_branch(const std::filesystem::path& folder, const std::string& command, const std::string& job,
                  FileSystem& fs = posix_file_system());
/// A command that asks for no branch goes on with the newest step: the next that asks for one begins it anew.
void forget_branch(const std::filesystem::path& folder, FileSystem& fs = posix_file_system());

/// Whether step-`branch.step` is the state that the branch began from, or is there no more (keep_latest_k).
bool has_same_base(const std::filesystem::path& folder, const Branch& branch);

}  // namespace phalanx
