// How many processor cores this process may use: not what the machine has, but what is left after the affinity mask
// (taskset, Slurm, a batch system) and the container's quota (cgroup version 1 or 2, also those of parents).
//
//   const int threads = std::max(1, usable_cores() / local_ranks);
#pragma once

#include <filesystem>
#include <optional>

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

}  // namespace phalanx
