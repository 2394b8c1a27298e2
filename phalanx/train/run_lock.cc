#include "phalanx/train/run_lock.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "phalanx/base/file.h"
#include "phalanx/base/log.h"
#include "phalanx/train/first_rank.h"

namespace phalanx::train {
namespace {

bool lies_in(const std::filesystem::path& path, const std::filesystem::path& folder) {
  return std::ranges::mismatch(folder, path).in1 == folder.end();
}

std::filesystem::path plain_path(const std::filesystem::path& path) {
  const auto plain = std::filesystem::absolute(path).lexically_normal();
  return plain.has_filename() ? plain : plain.parent_path();
}

}  // namespace

RunLock::RunLock(const TrainConfig& config, Communicator& world, const RunLockOptions& options) {
  // The other ranks wait for this one meanwhile.
  const auto patience = std::min<std::chrono::milliseconds>(
      options.patience, std::chrono::milliseconds(500 * config.comm.init_timeout_seconds));
  on_first_rank(world, [&] {
    const auto take = [&](const std::filesystem::path& folder, const char* key) {
      locks_.push_back(std::make_unique<FolderLock>(
          folder,
          FolderLockOptions{.advice = std::string("choose another ") + key, .wait = patience, .say = options.say}));
      if (const std::string& reason = locks_.back()->unsupported(); !reason.empty()) log::warn_once(reason);
    };
    const auto run = plain_path(config.job.dump_folder);
    const auto checkpoints = plain_path(in_dump_folder(config, config.checkpoint.folder));
    if (config.checkpoint.enable)
      posix_file_system().make_directory(checkpoints);  // told before a run's folder is made
    take(config.job.dump_folder, "[job] dump_folder");
    if (!config.checkpoint.enable || lies_in(checkpoints, run)) return;
    // Elsewhere: perhaps within another run's folder, which that run holds.
    const auto owner = checkpoints.parent_path();
    if (owner != run && std::filesystem::exists(owner / kFolderLockName)) take(owner, "[checkpoint] folder");
    take(checkpoints, "[checkpoint] folder");
  });
}

}  // namespace phalanx::train
