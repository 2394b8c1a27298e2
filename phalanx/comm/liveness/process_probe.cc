#include "phalanx/comm/liveness/process_probe.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <sstream>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"

namespace phalanx {
namespace {

// If two observations are further apart than this, the time between them does not count.
constexpr std::chrono::milliseconds kLongestGap{1'000};

// The state letter (field 3 of /proc/<pid>/stat) and the start time (field 22).
struct ProcessStat {
  char state = '?';  // X: there is no such process. ?: it cannot be read, as when this process has no descriptor left
  std::uint64_t start_time = 0;
};

ProcessStat read_process_stat(int pid) {
  const int fd = open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {.state = errno == ENOENT ? 'X' : '?'};
  char text[1024];
  const ssize_t got = read(fd, text, sizeof text);
  const bool has_ended = got < 0 && errno == ESRCH;
  close(fd);
  if (got <= 0) return {.state = has_ended ? 'X' : '?'};
  // The name (field 2) is in parentheses and may hold anything.
  const std::string line(text, static_cast<std::size_t>(got));
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  ProcessStat stat;
  std::string skipped;
  fields >> stat.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> stat.start_time;
  return fields ? stat : ProcessStat{};
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

std::chrono::milliseconds heartbeat_timeout(std::chrono::milliseconds limit, std::chrono::milliseconds tick) {
  // Detection with the fastest tick, telling the others and unwinding take some 0.6 s on gloo.
  const auto rest = std::chrono::milliseconds(1'000) + std::max(tick - kFastestTick, std::chrono::milliseconds(0));
  return limit - std::min(limit / 2, rest);
}

std::string ProcessProbe::identity() {
  std::string text = identity_of(getpid());
  if (text.empty()) throw CommError("this process's /proc/<pid>/stat cannot be read: is /proc mounted?");
  return text;
}

std::string ProcessProbe::identity_of(int pid) {
  const ProcessStat stat = read_process_stat(pid);
  if (stat.start_time == 0) return {};
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
    const bool is_here = space == here && process.pid > 0;
    process.is_self = is_here && process.pid == getpid();
    // A process that /proc does not show is dead, or hidden.
    const char state = read_process_stat(process.pid).state;
    process.is_visible =
        is_here && !process.is_self && state != '?' && (state != 'X' || (kill(process.pid, 0) != 0 && errno == ESRCH));
    processes_.push_back(process);
  }
}

bool ProcessProbe::can_see(int rank) const {
  const Process& process = processes_[static_cast<std::size_t>(rank)];
  return process.is_self || process.is_visible;
}

bool ProcessProbe::shares_network(int rank) const { return processes_[static_cast<std::size_t>(rank)].shares_network; }

// As in ProcessStat; X also if the process is a zombie, or its pid belongs to another one by now.
char ProcessProbe::state_of(const Process& process) {
  const ProcessStat stat = read_process_stat(process.pid);
  if (stat.state == '?') return '?';
  return stat.start_time == process.start_time && stat.state != 'Z' ? stat.state : 'X';
}

bool ProcessProbe::is_dead(int rank) const {
  const Process& process = processes_[static_cast<std::size_t>(rank)];
  return process.is_visible && state_of(process) == 'X';
}

std::string ProcessProbe::failure_reason(int rank) {
  Process& process = processes_[static_cast<std::size_t>(rank)];
  if (!process.is_visible) return {};
  const char state = state_of(process);
  if (state == 'X') return fmt::format("has died (process {})", process.pid);
  if (heartbeat_.count() <= 0) return {};
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (state != 'T') {
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
