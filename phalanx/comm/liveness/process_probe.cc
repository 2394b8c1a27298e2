#include "phalanx/comm/liveness/process_probe.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"

namespace phalanx {
namespace {

// If two observations are further apart than this, the time between them does not count.
constexpr std::chrono::milliseconds kLongestGap{1'000};

// The state letter (field 3 of /proc/<pid>/stat) and the start time (field 22). False if there is no such process.
struct ProcessStat {
  char state = 'X';
  std::uint64_t start_time = 0;
};

bool read_process_stat(int pid, ProcessStat& stat) {
  const int fd = open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char text[1024];
  const ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  if (got <= 0) return false;
  text[got] = '\0';
  // The name (field 2) is in parentheses and may hold anything.
  const std::string line(text);
  const std::size_t after_name = line.rfind(')');
  if (after_name == std::string::npos) return false;
  std::istringstream fields(line.substr(after_name + 1));
  std::string skipped;
  fields >> stat.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> stat.start_time;
  return !fields.fail();
}

int open_pidfd(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  errno = ENOSYS;
  return -1;
#endif
}

// Identifies a namespace ("pid" or "net") of this process: the running kernel and the namespace's number there.
std::string name_space(const char* kind) {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  struct stat status {};
  const bool known = stat(fmt::format("/proc/self/ns/{}", kind).c_str(), &status) == 0;
  return fmt::format("{}:{}", boot_id.empty() ? "?" : boot_id, known ? status.st_ino : 0);
}

}  // namespace

std::chrono::milliseconds heartbeat_limit(std::optional<std::chrono::milliseconds> chosen) {
  if (chosen) return *chosen;
  constexpr const char* kVariable = "PHALANX_COMM_HEARTBEAT_SECONDS";
  const auto seconds = env_double(kVariable);
  if (!seconds) return kDefaultHeartbeat;
  if (!(*seconds >= 0 && *seconds <= 86'400))
    throw ConfigError(fmt::format("{} is {}: expected seconds from 0 (off) to 86400", kVariable, *seconds));
  return std::chrono::milliseconds(static_cast<std::int64_t>(*seconds * 1000));
}

std::chrono::milliseconds heartbeat_timeout(std::chrono::milliseconds limit) {
  // Detection, telling the others and unwinding take some 0.6 s on gloo.
  return limit - std::min(limit / 2, std::chrono::milliseconds(1'000));
}

std::string ProcessProbe::identity() {
  std::string text = identity_of(getpid());
  if (text.empty()) throw CommError("this process's /proc/<pid>/stat cannot be read: is /proc mounted?");
  return text;
}

std::string ProcessProbe::identity_of(int pid) {
  ProcessStat stat;
  if (!read_process_stat(pid, stat)) return {};
  return fmt::format("{} {} {} {}", name_space("pid"), pid, stat.start_time, name_space("net"));
}

ProcessProbe::ProcessProbe(const std::vector<std::string>& identities, std::chrono::milliseconds heartbeat)
    : heartbeat_(heartbeat) {
  const std::string here = name_space("pid"), network_here = name_space("net");
  for (const std::string& text : identities) {
    Process process;
    std::string space, network;
    std::istringstream(text) >> space >> process.pid >> process.start_time >> network;
    process.shares_network = network == network_here;
    process.is_self = space == here && process.pid == getpid();
    if (space == here && process.pid > 0 && !process.is_self) {
      process.pidfd = open_pidfd(process.pid);
      ProcessStat stat;
      process.can_be_read = read_process_stat(process.pid, stat);
      // The pid may be unused by now, or belong to another process: then the rank is gone.
      const bool is_another = process.can_be_read && stat.start_time != process.start_time;
      const bool is_gone = is_another || (kill(process.pid, 0) != 0 && errno == ESRCH);
      process.is_visible = process.pidfd >= 0 || process.can_be_read || is_gone;
      if (is_gone && process.pidfd >= 0) {
        close(process.pidfd);
        process.pidfd = -1;
      }
    }
    processes_.push_back(process);
  }
}

ProcessProbe::~ProcessProbe() {
  for (const Process& process : processes_)
    if (process.pidfd >= 0) close(process.pidfd);
}

bool ProcessProbe::can_see(int rank) const {
  const Process& process = processes_[static_cast<std::size_t>(rank)];
  return process.is_self || (process.is_visible && process.can_be_read);
}

bool ProcessProbe::shares_network(int rank) const { return processes_[static_cast<std::size_t>(rank)].shares_network; }

bool ProcessProbe::is_dead(int rank) const {
  const Process& process = processes_[static_cast<std::size_t>(rank)];
  if (!process.is_visible) return false;
  if (process.pidfd >= 0) {
    pollfd watched{process.pidfd, POLLIN, 0};
    return poll(&watched, 1, 0) == 1 && (watched.revents & POLLIN) != 0;
  }
  ProcessStat stat;
  return !read_process_stat(process.pid, stat) || stat.start_time != process.start_time || stat.state == 'Z' ||
         stat.state == 'X';
}

std::string ProcessProbe::failure_reason(int rank) {
  Process& process = processes_[static_cast<std::size_t>(rank)];
  if (!process.is_visible) return {};
  if (is_dead(rank)) return fmt::format("has died (process {})", process.pid);
  return heartbeat_.count() > 0 ? why_stopped(process) : std::string();
}

std::string ProcessProbe::why_stopped(Process& process) {
  ProcessStat stat;
  const bool stopped =
      read_process_stat(process.pid, stat) && stat.start_time == process.start_time && stat.state == 'T';
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (!stopped) {
    process.looked_at = {};
    return {};
  }
  if (now - process.looked_at > kLongestGap) process.stopped_since = now;
  process.looked_at = now;
  const auto since = now - process.stopped_since;
  if (since < heartbeat_timeout(heartbeat_)) return {};
  return fmt::format("is stopped (SIGSTOP): process {} has stood still for {:.1f} s; `kill -CONT {}` lets it go on",
                     process.pid, std::chrono::duration<double>(since).count(), process.pid);
}

}  // namespace phalanx
