// RunLock lets one run at a time write to a run's folders (base/folder_lock.h).
//
// Rank 0 holds the lock for as long as the object lives. Another process that trains into [job] dump_folder, or into
// the same [checkpoint] folder, fails on all ranks with the holder's host and process, unless the holder ends within
// `lock_timeout`.
//
//   const RunLock lock(config, *world, {.lock_timeout = 2s, .log_info = log_info});       // collective
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
  RunLock(const config::TrainConfig& config, Communicator& world, const RunLockOptions& options);

 private:
  std::vector<std::unique_ptr<FolderLock>> locks_;
};

}  // namespace phalanx::train
