// FolderLock: only one process at a time writes to a folder. Another process is refused; the error names the holder's
// host and process.
//
// - It is a kernel lock (an open-file-description lock on FOLDER/.phalanx.lock), so it ends with the process that holds
//   it, however that ends. The file stays; without a lock on it, it has no meaning.
// - It works between the nodes of a network file system that supports such locks (NFS 4; NFS 3 with lockd; Lustre with
//   -o flock). If a file system has none, unsupported() says so and no process is refused.
// - A second lock in the same process is refused too: the holder is an object, not a process.
//
//   FolderLock lock("outputs", {.advice = "choose another [job] dump_folder"});
//   // outputs is in use by process 4711 on host n07: ...
//   if (!lock.unsupported().empty()) log::warn(lock.unsupported());
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace phalanx {

struct FolderLockOptions {
  std::string advice = {};                                     // what the user can do instead, for the error
  std::chrono::milliseconds wait{0};                           // how long to wait for the holder to end
  std::function<void(const std::string& line)> log_info = {};  // called once if it waits
};

class FolderLock {
 public:
  /// Creates the folder if it is missing. Throws Error, which names the holder, if the lock is held, and FileError if
  /// the folder cannot be written to.
  explicit FolderLock(const std::filesystem::path& folder, const FolderLockOptions& options = {});
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  /// The reason why there is no lock, if the file system has no locks; otherwise empty.
  const std::string& unsupported() const noexcept { return unsupported_; }

 private:
  int descriptor_ = -1;
  std::string unsupported_;
};

inline constexpr const char* kFolderLockName = ".phalanx.lock";

/// For a command that writes `paths` (files or folders, which may not exist yet). It takes the locks of these paths and
/// of all folders above them, where there is a lock file. So the command does not write into a running job's folder,
/// and no job starts there in the meantime.
///
///   const OwnerLocks locks({"outputs/checkpoint/step-120"}, {.advice = "choose another OUT"});
class OwnerLocks {
 public:
  /// Throws Error, which names the holder, if a lock is held.
  explicit OwnerLocks(const std::vector<std::filesystem::path>& paths, const FolderLockOptions& options = {});

  /// The folders that could not be checked, and why.
  const std::vector<std::string>& warnings() const noexcept { return warnings_; }

 private:
  std::vector<std::unique_ptr<FolderLock>> locks_;
  std::vector<std::string> warnings_;
};

}  // namespace phalanx
