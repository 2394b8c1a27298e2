// The rollback of a run ([checkpoint] load_step): newer checkpoints are set aside (checkpoint/files/branch.h), beside them
// the curve as it was, and run.json lists it under "branches":
//
//   {"step": 4, "set_aside": ["step-8", "step-12"], "into": "outputs/checkpoint/abandoned-1", "time": 1764093600.0}
//
// Crash-safe as a whole: interrupted at any file operation it has not begun, or the next start completes it, and the
// entry is there once, then with "interrupted": true. One process at a time calls (run_lock.h).
//
//   const SetAside aside = roll_back({.checkpoints = folder, .run = dump_folder}, {.step = 4, .command = hash});
//   if (const auto left = finish_rollback(folders)) say(...);          // at the next start, first of all
#pragma once

#include <filesystem>
#include <optional>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/branch.h"

namespace phalanx::train {

struct RollbackFolders {
  std::filesystem::path checkpoints;  // with the branch's record
  std::filesystem::path run;          // with run.json and metrics.jsonl
};

SetAside roll_back(const RollbackFolders& folders, Branch branch, FileSystem& fs = posix_file_system());

/// What an interrupted one set aside, all of it; nothing where none was interrupted.
std::optional<SetAside> finish_rollback(const RollbackFolders& folders, FileSystem& fs = posix_file_system());

}  // namespace phalanx::train
