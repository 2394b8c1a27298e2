#include "phalanx/base/signals.h"

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>

namespace phalanx {

std::optional<int> signal_of_name(std::string_view name) {
  if (name.starts_with("SIG")) name.remove_prefix(3);
  for (int signal = 1; signal < NSIG; ++signal) {
    const char* known = sigabbrev_np(signal);
    if (known == nullptr || name != known) continue;
    if (signal == SIGKILL || signal == SIGSTOP) break;
    return signal;
  }
  return std::nullopt;
}

std::string name_of_signal(int signal) {
  const char* known = sigabbrev_np(signal);
  return known != nullptr ? std::string("SIG") + known : "signal " + std::to_string(signal);
}

namespace {

/// True if one of these lines of the process's status contains the signal.
bool is_in_status(pid_t process, int signal, std::initializer_list<std::string_view> sets) {
  std::ifstream status("/proc/" + std::to_string(process) + "/status");
  const std::uint64_t bit = std::uint64_t{1} << (signal - 1);
  for (std::string line; std::getline(status, line);) {
    if (std::ranges::none_of(sets, [&](std::string_view set) { return line.starts_with(set); })) continue;
    if ((std::strtoull(line.c_str() + 7, nullptr, 16) & bit) != 0) return true;
  }
  return false;
}

}  // namespace

bool handles_signal(pid_t process, int signal) {
  return is_in_status(process, signal, {"SigBlk:", "SigIgn:", "SigCgt:"});
}

bool ignores_signal(pid_t process, int signal) { return is_in_status(process, signal, {"SigIgn:"}); }

namespace {

struct StatOfProcess {
  char state = 'X';
  pid_t group = 0;
};

std::optional<StatOfProcess> stat_of(const std::filesystem::path& folder) {
  std::ifstream file(folder / "stat");
  std::string line;
  std::getline(file, line);
  // The name (field 2) is in parentheses and may contain any character. The state, the parent and the group follow.
  const std::size_t after_name = line.rfind(')');
  if (after_name == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(after_name + 1));
  StatOfProcess stat;
  pid_t parent = 0;
  if (fields >> stat.state >> parent >> stat.group) return stat;
  return std::nullopt;
}

}  // namespace

bool is_stopped(pid_t process) {
  const auto stat = stat_of("/proc/" + std::to_string(process));
  return stat && stat->state == 'T';
}

std::vector<pid_t> processes_of_group(pid_t group) {
  std::vector<pid_t> members;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    pid_t process = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), process).ptr != name.data() + name.size()) continue;
    if (const auto stat = stat_of(entry.path()); stat && stat->group == group) members.push_back(process);
  }
  return members;
}

}  // namespace phalanx
