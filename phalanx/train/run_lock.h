// RunLock: one run at a time writes to a run's folders (base/folder_lock.h).
//
// Rank 0 holds it for as long as the object lives; another process that trains into [job] dump_folder, or into the same
// [checkpoint] folder, is refused on all ranks with the holder's host and process, unless that ends within `lock_timeout`.
//
//   const RunLock lock(config, *world, {.lock_timeout = 2s, .log_info = say});       // collective
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/folder_lock.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/config/config.h"

namespace phalanx::train {

struct RunLockOptions {
  std::chrono::milliseconds lock_timeout{0};
  std::function<void(const std::string& line)> log_info = {};
};

class RunLock {
 public:
  RunLock(const TrainConfig& config, Communicator& world, const RunLockOptions& options);

 private:
  std::vector<std::unique_ptr<FolderLock>> locks_;
};

}  // namespace phalanx::train
