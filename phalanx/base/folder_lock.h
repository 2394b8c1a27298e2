// FolderLock: one process at a time writes to a folder; another is refused with the holder's host and process.
//
// - The lock is the kernel's (an open-file-description lock on FOLDER/.phalanx.lock), so it goes with the process that
//   holds it, however that ends. The file stays; without a lock on it, it means nothing.
// - It holds between the nodes of a network file system that passes locks on (NFS 4; NFS 3 with lockd; Lustre with
//   -o flock). Where a file system has none, unsupported() says so and nobody is refused.
// - Taken twice in one process it is refused, too: the holder is an object, not a process.
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
  std::string advice = {};                                     // what else can be done, for the refusal
  std::chrono::milliseconds wait{0};                           // for a holder that is about to end
  std::function<void(const std::string& line)> log_info = {};  // told once, where it waits
};

class FolderLock {
 public:
  /// Makes the folder. An Error names the holder; a FileError says why the folder cannot be written to.
  explicit FolderLock(const std::filesystem::path& folder, const FolderLockOptions& options = {});
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  /// Why there is no lock, where the file system has none; else empty.
  const std::string& unsupported() const noexcept { return unsupported_; }

 private:
  int descriptor_ = -1;
  std::string unsupported_;
};

inline constexpr const char* kFolderLockName = ".phalanx.lock";

/// For a command that writes `paths` (files or folders, there already or not): takes the locks of all folders above
/// them, themselves included, that have one, so that it writes into no run that lives, and none begins meanwhile.
///
///   const OwnerLocks locks({"outputs/checkpoint/step-120"}, {.advice = "choose another OUT"});
class OwnerLocks {
 public:
  /// An Error names the holder.
  explicit OwnerLocks(const std::vector<std::filesystem::path>& paths, const FolderLockOptions& options = {});

  /// Of which folders it could not be found out, and why.
  const std::vector<std::string>& warnings() const noexcept { return warnings_; }

 private:
  std::vector<std::unique_ptr<FolderLock>> locks_;
  std::vector<std::string> warnings_;
};

}  // namespace phalanx
