// How many processor cores this process may use: not what the machine has, but what is left after the affinity mask
// (taskset, Slurm, a batch system) and the container's quota (cgroup version 1 or 2, also those of parents). And how
// much their last cache holds.
//
//   const int threads = std::max(1, usable_cores() / local_ranks);
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace phalanx {

struct CpuLimits {
  int online = 1;               // cores of the machine
  int affinity = 1;             // cores the mask allows
  std::optional<double> quota;  // cores' worth of time per second, where a cgroup limits it
  int usable = 1;               // min(affinity, quota rounded up), at least 1
};

/// `root` replaces "/" in /proc/self/{cgroup,mountinfo} and in the mount points, for tests.
CpuLimits cpu_limits(const std::filesystem::path& root = "/");

int usable_cores();

/// OMP_NUM_THREADS, the first number of a list of them; nothing if it is not set. A ConfigError if that is no number of
/// threads: OpenMP itself takes another one then, without a word.
std::optional<int> threads_from_environment();

/// The first core's last cache, and how many cores share it.
struct LastLevelCache {
  std::uint64_t bytes = 0;  // 0: the kernel does not say
  int cores = 1;
};

/// `root` replaces "/" in /sys/devices/system/cpu, for tests.
LastLevelCache last_level_cache(const std::filesystem::path& root = "/");

/// Of the kernel's words: "48K", "2048K", "32M"; 0 where it is no such word.
std::uint64_t parse_cache_bytes(const std::string& text);

}  // namespace phalanx
