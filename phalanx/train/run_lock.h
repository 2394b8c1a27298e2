// RunLock: one run at a time writes to a run's folders (base/folder_lock.h).
//
// Rank 0 holds it for as long as the object lives; another process that trains into [job] dump_folder, or into the same
// [checkpoint] folder, is refused on all ranks with the holder's host and process. An attempt that a launcher or a
// scheduler starts again waits for the one before to end.
//
//   const RunLock lock(config, *world, {.is_restart = true, .say = say});       // collective
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/folder_lock.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/train/config.h"

namespace phalanx::train {

struct RunLockOptions {
  bool is_restart = false;
  std::function<void(const std::string& line)> say = {};
};

class RunLock {
 public:
  RunLock(const TrainConfig& config, Communicator& world, const RunLockOptions& options);

 private:
  std::vector<std::unique_ptr<FolderLock>> locks_;
};

}  // namespace phalanx::train
