#include "phalanx/launch/supervisor/launch_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <string>
#include <system_error>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/memory_limits.h"

namespace phalanx {
namespace {

constexpr const char* kOwnerFile = "owner";
constexpr const char* kUnfinishedFile = "owner.new";
constexpr time_t kUnfinishedSeconds = 60;  // much longer than a launcher needs from creating the folder to locking it

/// True if the file `owner` names the kernel of this machine.
bool names_this_machine(int owner) {
  char text[256];
  const ssize_t got = read(owner, text, sizeof text);
  const std::string machine = node_identity();
  return got >= 0 && !machine.empty() && std::string(text, static_cast<std::size_t>(got)) == machine;
}

/// If the owners of this folder, on this machine, are dead: takes its lock and returns it.
UniqueFd lock_of_dead(const std::filesystem::path& folder) {
  UniqueFd owner(open((folder / kOwnerFile).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!owner || !names_this_machine(owner.get()) || flock(owner.get(), LOCK_EX | LOCK_NB) != 0) return {};
  return owner;
}

/// Removes the folder of a launcher that was killed before it locked the folder: empty, or with only the unfinished
/// file.
void remove_unfinished(const std::filesystem::path& folder, const struct stat& status) {
  if (time(nullptr) - status.st_mtime < kUnfinishedSeconds) return;
  const auto path = folder / kUnfinishedFile;
  const UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (file) {  // it stays locked while it is checked and removed
    struct stat found {};
    const bool is_empty = fstat(file.get(), &found) == 0 && found.st_size == 0;
    if (!is_empty && !names_this_machine(file.get())) return;
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) return;
    for (std::error_code error; const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      if (entry.path().filename() != kUnfinishedFile) return;
    }
    unlink(path.c_str());
  }
  rmdir(folder.c_str());  // fails if the folder is not empty
}

}  // namespace

LaunchFolder::LaunchFolder() : folder_((remove_abandoned(), "launch")) {
  // The file has another name until it is locked, so that no process finds the final name without a lock.
  const auto unfinished = path() / kUnfinishedFile;
  lock_.reset(open(unfinished.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const std::string machine = node_identity();
  if (!lock_ || write(lock_.get(), machine.data(), machine.size()) != static_cast<ssize_t>(machine.size()))
    throw Error(fmt::format("cannot write {}: {}", unfinished.string(), std::strerror(errno)));
  if (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) return;  // no locks on this file system: no proof, no removal
  std::error_code ignored;
  std::filesystem::rename(unfinished, path() / kOwnerFile, ignored);
}

void LaunchFolder::remove_abandoned() noexcept {
  try {
    const std::filesystem::path parent = env_string("TMPDIR").value_or("/tmp");
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(parent, error)) {
      if (!entry.path().filename().string().starts_with("phalanx-launch-")) continue;
      struct stat status {};
      if (lstat(entry.path().c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != geteuid()) continue;
      if (const UniqueFd lock = lock_of_dead(entry.path())) {
        std::filesystem::remove_all(entry.path(), error);
      } else {
        remove_unfinished(entry.path(), status);
      }
    }
  } catch (const std::exception&) {
    // Folders that stay do no harm.
  }
}

}  // namespace phalanx
