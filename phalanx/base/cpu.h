// The number of processor cores that this process may use, and the size of their last-level cache. It is not the number
// of cores of the machine. It respects the affinity mask (taskset, Slurm, a batch system) and the container's quota
// (cgroup version 1 or 2, including parent groups).
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
  std::optional<double> quota;  // in cores (processor seconds per second), if a cgroup limits it
  int usable = 1;               // min(affinity, quota rounded up), at least 1
};

/// `root` replaces "/" in /proc/self/{cgroup,mountinfo} and in the mount points, for tests.
CpuLimits cpu_limits(const std::filesystem::path& root = "/");

int usable_cores();

/// OMP_NUM_THREADS; if it is a list, its first number. nullopt if it is not set. Throws ConfigError if it is not a
/// valid number of threads, since OpenMP would silently use another number.
std::optional<int> threads_from_environment();

/// The last-level cache of the first core, and how many cores share it.
struct LastLevelCache {
  std::uint64_t bytes = 0;  // 0: the kernel does not say
  int cores = 1;
};

/// `root` replaces "/" in /sys/devices/system/cpu, for tests.
LastLevelCache last_level_cache(const std::filesystem::path& root = "/");

/// Parses a size as the kernel writes it: "48K", "2048K", "32M". Returns 0 for any other text.
std::uint64_t parse_cache_bytes(const std::string& text);

}  // namespace phalanx
