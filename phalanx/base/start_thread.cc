#include "phalanx/base/start_thread.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/memory_limits.h"

namespace phalanx {
namespace {

constexpr rlim_t kSmallestStack = rlim_t{1} << 20;

std::optional<std::uint64_t> number_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? std::optional(value) : std::nullopt;  // "max" is not a number
}

// The number of threads of this user, which RLIMIT_NPROC limits.
std::uint64_t threads_of_user(const std::filesystem::path& root) {
  std::uint64_t count = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root / "proc", error)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream status(entry.path() / "status");
    std::uint64_t user = ~std::uint64_t{0}, threads = 0;
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("Uid:")) user = std::strtoull(line.c_str() + 4, nullptr, 10);
      if (line.starts_with("Threads:")) threads = std::strtoull(line.c_str() + 8, nullptr, 10);
    }
    if (user == getuid()) count += threads;
  }
  return count;
}

// The groups that limit this process, from its own to the root of what is mounted. Lines of /proc/self/cgroup:
// "0::/path" (v2), "7:pids:/path" (v1).
std::string pids_of_cgroups(const std::filesystem::path& root) {
  std::ifstream lines(root / "proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers != "pids") continue;
    const auto mount = root / (controllers.empty() ? "sys/fs/cgroup" : "sys/fs/cgroup/pids");
    // In a container the path may not exist. Then the mount is the group itself.
    auto group = mount / std::filesystem::path(line.substr(second + 1)).relative_path();
    std::error_code error;
    if (!std::filesystem::exists(group, error)) group = mount;
    for (;; group = group.parent_path()) {
      if (const auto most = number_of(group / "pids.max"))
        return fmt::format("the cgroup's pids.max is {} ({}/pids.max), of which {} are in use", *most, group.string(),
                           number_of(group / "pids.current").value_or(0));
      if (group == mount || !group.has_relative_path()) break;
    }
  }
  return {};
}

}  // namespace

std::string memory_limits_text() {
  std::string text;
  for (const MemoryLimit& limit : memory_limits()) {
    if (!limit.name.starts_with("RLIMIT_")) continue;
    text +=
        fmt::format("{}{} (ulimit -{})", text.empty() ? "" : "; ", limit.text(), limit.name == "RLIMIT_AS" ? 'v' : 'd');
  }
  return text;
}

std::string thread_limits_text(const std::filesystem::path& root) {
  std::vector<std::string> parts;
  rlimit limit{};
  // The stack of a thread needs memory too.
  if (std::string text = memory_limits_text(); !text.empty()) {
    if (getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
      text += fmt::format(", and each thread wants {} for its stack (ulimit -s)", human_bytes(limit.rlim_cur));
    parts.push_back(std::move(text));
  }
  if (getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    parts.push_back(fmt::format("RLIMIT_NPROC is {} threads of this user (ulimit -u), of which {} are in use",
                                limit.rlim_cur, threads_of_user(root)));
  if (std::string text = pids_of_cgroups(root); !text.empty()) parts.push_back(std::move(text));
  if (const auto most = number_of(root / "proc/sys/kernel/threads-max"))
    parts.push_back(fmt::format("the kernel allows {} (kernel.threads-max)", *most));
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : "; ") + part;
  return text.empty() ? "no limit is known here" : text;
}

void throw_not_started(const std::string& what, int error) {
  if (error != EAGAIN)
    throw Error(fmt::format("a thread or process could not be started ({}): {}", what, std::strerror(error)));
  throw Error(fmt::format(
      "a thread or process could not be started ({}): the system gives no more ({}). {}. Raise the limit "
      "that is used up ({}ulimit -u, the container's --pids-limit, the job's TasksMax), or start fewer ranks "
      "or threads (OMP_NUM_THREADS)",
      what, std::strerror(error), thread_limits_text(), memory_limits_text().empty() ? "" : "ulimit -v, ulimit -d, "));
}

void check_threads(int count) {
  std::mutex mutex;
  std::condition_variable changed;
  bool may_end = false;
  std::vector<std::thread> threads;
  const auto end_all = [&] {
    {
      const std::lock_guard lock(mutex);
      may_end = true;
    }
    changed.notify_all();
    for (std::thread& thread : threads) thread.join();
  };
  try {
    for (int i = 0; i < count; ++i)
      threads.emplace_back([&] {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return may_end; });
      });
  } catch (const std::system_error& error) {
    const auto started = threads.size();
    end_all();
    throw_not_started(fmt::format("{} of the {} that are needed", started, count), error.code().value());
  }
  end_all();
}

void check_stack() {
  rlimit limit{};
  if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= kSmallestStack) return;
  throw Error(
      fmt::format("the stack is limited to {} (RLIMIT_STACK, ulimit -s): expected at least {}, or threads end "
                  "without a word. Raise it: ulimit -s 8192",
                  human_bytes(limit.rlim_cur), human_bytes(kSmallestStack)));
}

}  // namespace phalanx
