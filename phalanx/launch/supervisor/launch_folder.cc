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
constexpr time_t kUnfinishedSeconds = 60;  // far more than a launcher takes from the folder to the lock

/// Whether the file at the beginning of `owner` names this machine's kernel.
bool names_this_machine(int owner) {
  char text[256];
  const ssize_t got = read(owner, text, sizeof text);
  const std::string machine = node_identity();
  return got >= 0 && !machine.empty() && std::string(text, static_cast<std::size_t>(got)) == machine;
}

/// Of a folder on this machine whose owners have gone: its lock, which is the caller's then.
UniqueFd lock_of_dead(const std::filesystem::path& folder) {
  UniqueFd owner(open((folder / kOwnerFile).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!owner || !names_this_machine(owner.get()) || flock(owner.get(), LOCK_EX | LOCK_NB) != 0) return {};
  return owner;
}

/// Removes a folder whose launcher was killed before it had locked it: empty, or with the unfinished file alone.
void remove_unfinished(const std::filesystem::path& folder, const struct stat& status) {
  if (time(nullptr) - status.st_mtime < kUnfinishedSeconds) return;
  const auto path = folder / kUnfinishedFile;
  const UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (file) {  // locked as long as it is looked at and removed
    struct stat found {};
    const bool is_empty = fstat(file.get(), &found) == 0 && found.st_size == 0;
    if (!is_empty && !names_this_machine(file.get())) return;
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) return;
    for (std::error_code error; const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      if (entry.path().filename() != kUnfinishedFile) return;
    }
    unlink(path.c_str());
  }
  rmdir(folder.c_str());  // fails where anything is in it
}

}  // namespace

LaunchFolder::LaunchFolder() : folder_((remove_abandoned(), "launch")) {
  // Under another name until it is locked: nobody is to find the file and nobody's lock on it.
  const auto unfinished = path() / kUnfinishedFile;
  lock_.reset(open(unfinished.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const std::string machine = node_identity();
  if (!lock_ || write(lock_.get(), machine.data(), machine.size()) != static_cast<ssize_t>(machine.size()))
    throw Error(fmt::format("cannot write {}: {}", unfinished.string(), std::strerror(errno)));
  if (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) return;  // a file system without locks: then no proof, and no removal
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
    // What was left behind does no harm.
  }
}

}  // namespace phalanx
