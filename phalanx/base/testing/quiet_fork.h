// fork() in a test whose process has other threads, such as a store's server. A child that finds a lock of
// AddressSanitizer's allocator held by a thread that it does not have waits for it for ever.
#pragma once

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "phalanx/base/testing/under_sanitizer.h"

namespace phalanx {

/// True if every other thread of this process sleeps.
inline bool other_threads_sleep() {
  const std::string own = std::to_string(gettid());
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == own) continue;
    std::ifstream file(task.path() / "stat");
    const std::string stat(std::istreambuf_iterator<char>(file), {});
    const std::size_t name_end = stat.rfind(") ");  // "12 (name) S ..."
    if (name_end != std::string::npos && stat[name_end + 2] != 'S') return false;
  }
  return true;
}

/// fork(). Under a sanitizer it first waits until the other threads sleep, for ten seconds at most. REQUIRES: nothing
/// wakes them meanwhile, such as an earlier child (ForkGate).
inline pid_t quiet_fork() {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (kUnderSanitizer && !other_threads_sleep() && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return fork();
}

}  // namespace phalanx
