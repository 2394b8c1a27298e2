#include "phalanx/train/run_lock.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <system_error>

#include "phalanx/base/file.h"
#include "phalanx/base/log.h"
#include "phalanx/train/ranks/first_rank.h"

namespace phalanx::train {
namespace {

bool lies_in(const std::filesystem::path& path, const std::filesystem::path& folder) {
  return std::ranges::mismatch(folder, path).in1 == folder.end();
}

/// One path for a folder, whichever links lead to it. A folder that does not exist yet keeps its name.
std::filesystem::path real_path(const std::filesystem::path& path) {
  std::error_code error;
  const auto real = std::filesystem::weakly_canonical(std::filesystem::absolute(path), error);
  return error ? std::filesystem::absolute(path).lexically_normal() : real;
}

}  // namespace

RunLock::RunLock(const config::TrainConfig& config, Communicator& world, const RunLockOptions& options) {
  // Meanwhile the other ranks wait for this one.
  const auto lock_timeout = std::min<std::chrono::milliseconds>(
      options.lock_timeout, std::chrono::milliseconds(500 * config.comm.init_timeout_seconds));
  on_first_rank(world, [&] {
    const auto take = [&](const std::filesystem::path& folder, const char* key) {
      locks_.push_back(std::make_unique<FolderLock>(
          folder,
          FolderLockOptions{
              .advice = std::string("choose another ") + key, .wait = lock_timeout, .log_info = options.log_info}));
      if (const std::string& reason = locks_.back()->unsupported(); !reason.empty()) log::warn_once(reason);
    };
    const std::filesystem::path checkpoints = config::in_dump_folder(config, config.checkpoint.folder);
    if (config.checkpoint.enable)
      posix_file_system().make_directory(checkpoints);  // an error here comes before a run's folder is made
    take(config.job.dump_folder, "[job] dump_folder");
    const auto real = real_path(checkpoints), run = real_path(config.job.dump_folder);
    if (!config.checkpoint.enable || lies_in(real, run)) return;
    // Another folder, perhaps inside another run's folder, which that run holds.
    std::error_code error;
    for (auto owner = real.parent_path(); owner != owner.parent_path(); owner = owner.parent_path()) {
      if (std::filesystem::exists(owner / kFolderLockName, error)) take(owner, "[checkpoint] folder");
    }
    take(checkpoints, "[checkpoint] folder");
  });
}

}  // namespace phalanx::train
