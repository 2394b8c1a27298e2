// Rolls a run back to an earlier step ([checkpoint] load_step). Newer checkpoints are set aside
// (checkpoint/files/branch.h) together with the metrics curve as it was, and run.json lists it under "branches":
//
//   {"step": 4, "set_aside": ["step-8", "step-12"], "into": "outputs/checkpoint/abandoned-1", "time": 1764093600.0}
//
// A rollback is crash-safe as a whole. If it is interrupted at any file operation, either it has not begun or the next
// start completes it. The entry is then there once, with "interrupted": true. Only one process at a time may call
// (run_lock.h).
//
//   const SetAside aside = roll_back({.checkpoints = folder, .run = dump_folder}, {.step = 4, .command = hash});
//   if (const auto aside = finish_rollback(folders)) log_info("completed");          // first thing at the next start
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

/// Completes an interrupted rollback and returns everything it set aside; nothing if none was interrupted.
std::optional<SetAside> finish_rollback(const RollbackFolders& folders, FileSystem& fs = posix_file_system());

}  // namespace phalanx::train
