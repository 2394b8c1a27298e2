#include "phalanx/base/folder_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <system_error>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kLookAgain{50};
constexpr std::uint64_t kMaxHolderBytes = 4096;

std::string lock_host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

enum class LockOutcome { taken, held, unsupported };

LockOutcome try_lock(int descriptor) {
  struct flock whole {};  // l_pid must be 0
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  for (;;) {
    if (::fcntl(descriptor, F_OFD_SETLK, &whole) == 0) return LockOutcome::taken;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == EACCES ? LockOutcome::held : LockOutcome::unsupported;
  }
}

/// The holder's own text, "process 4711 on host n07". A holder that has just taken the lock may not have written it
/// yet.
std::string holder_of(const std::filesystem::path& file) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    std::string text;
    try {
      text = read_file(file, kMaxHolderBytes);
    } catch (const FileError&) {
    }
    if (const auto end = text.find('\n'); end != std::string::npos && end > 0) return text.substr(0, end);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return "a process that has not said which";
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder, const FolderLockOptions& options) {
  posix_file_system().make_directory(folder);
  const auto path = folder / kFolderLockName;
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    throw FileError(fmt::format("cannot open {} to lock the folder: {}", path.string(), std::strerror(errno)), errno);
  }
  LockOutcome outcome = try_lock(descriptor_);
  const int reason = errno;
  if (outcome == LockOutcome::held && options.wait.count() > 0) {
    if (options.log_info) {
      options.log_info(fmt::format("{} is in use by {}: waiting up to {} for it to end", folder.string(),
                                   holder_of(path),
                                   human_duration(std::chrono::duration<double>(options.wait).count())));
    }
    const auto end = std::chrono::steady_clock::now() + options.wait;
    while (outcome == LockOutcome::held && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kLookAgain);
      outcome = try_lock(descriptor_);
    }
  }
  if (outcome == LockOutcome::held) {
    const std::string holder = holder_of(path);
    ::close(descriptor_);
    throw Error(
        fmt::format("{} is in use by {}: two at once would overwrite each other's files; wait until it has "
                    "ended, stop it{}{}",
                    folder.string(), holder, options.advice.empty() ? "" : ", or ", options.advice));
  }
  if (outcome == LockOutcome::unsupported) {
    unsupported_ = fmt::format(
        "cannot lock {}: {}; its file system has no locks, so a second process that writes to it would not be noticed",
        path.string(), std::strerror(reason));
    ::close(descriptor_);
    descriptor_ = -1;
    return;
  }
  // For processes that are refused. If it cannot be written, only this information is missing.
  const std::string self = fmt::format("process {} on host {}\n", ::getpid(), lock_host_name());
  if (::ftruncate(descriptor_, 0) == 0 && ::pwrite(descriptor_, self.data(), self.size(), 0) > 0) {
    ::fdatasync(descriptor_);  // so that other nodes of a network file system see it
  }
}

FolderLock::~FolderLock() {
  if (descriptor_ < 0) return;
  if (::ftruncate(descriptor_, 0) != 0) {  // the remaining text then names no holder
  }
  ::close(descriptor_);
}

OwnerLocks::OwnerLocks(const std::vector<std::filesystem::path>& paths, const FolderLockOptions& options) {
  std::set<std::filesystem::path> owners;  // without duplicates: a second lock would be refused
  for (const auto& path : paths) {
    std::error_code error;
    auto place = std::filesystem::weakly_canonical(std::filesystem::absolute(path), error);
    for (;; place = place.parent_path()) {
      if (std::filesystem::exists(place / kFolderLockName, error)) owners.insert(place);
      if (place.empty() || place == place.parent_path()) break;
    }
  }
  for (const auto& owner : owners) {
    try {
      locks_.push_back(std::make_unique<FolderLock>(owner, options));
      if (!locks_.back()->unsupported().empty()) warnings_.push_back(locks_.back()->unsupported());
    } catch (const FileError& error) {
      warnings_.push_back(fmt::format("{}: a run that writes there would not be noticed", error.what()));
    }
  }
}

}  // namespace phalanx
