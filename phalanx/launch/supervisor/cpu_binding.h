// Which CPUs each local rank may run on. Torch-free; reads /sys and /proc below a root that tests replace.
//
// The modes are torchrun's --numa-binding. Each rank has a home: the NUMA node of the GPU that it computes on (entry
// LOCAL_RANK of the visible ones; visible_gpus.h), or where there is no GPU an even share of the machine's nodes, in
// order. GPUs are numbered by their addresses on the bus: as CUDA does on a machine of equal GPUs, and on any with
// CUDA_DEVICE_ORDER=PCI_BUS_ID.
//   node           all CPUs of the home
//   socket         all CPUs of every node of the home's socket
//   exclusive      an even share of the home's physical cores, with all their threads; no two ranks share one
//   core-complex   the cores around one last-level cache of the home, another one for each rank as far as they reach
// Or each rank's CPUs are listed. Only CPUs that this process may use are given away.
//
//   bind_ranks({.mode = NumaBinding::exclusive}, 8, current_environment())[3]   // {24, 25, ..., 31}
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/launch/supervisor/environment_preparation.h"

namespace phalanx {

enum class NumaBinding { none, node, socket, exclusive, core_complex };

/// "node", "socket", "exclusive", "core-complex". Throws UsageError naming `flag`.
NumaBinding parse_numa_binding(const std::string& flag, const std::string& text);

struct CpuBindingOptions {
  NumaBinding mode = NumaBinding::none;
  std::vector<std::vector<int>> lists;  // of each local rank, instead of a mode
  std::filesystem::path root = "/";
  std::optional<std::vector<int>> allowed;  // unset: this process's affinity mask
  bool is_set() const { return mode != NumaBinding::none || !lists.empty(); }
};

/// The CPUs of every local rank, in ascending order. Throws UsageError where the machine cannot be divided so.
std::vector<std::vector<int>> bind_ranks(const CpuBindingOptions& options, int ranks,
                                         const EnvironmentMap& environment);

/// How many threads suit the rank: its CPUs, where a CPU that n ranks share counts 1/n; at least 1.
int cores_for_rank(const std::vector<std::vector<int>>& cpus, int local_rank);

/// "0-3,8" -> {0, 1, 2, 3, 8}. Throws UsageError naming `what`.
std::vector<int> parse_cpu_list(const std::string& what, const std::string& text);

}  // namespace phalanx
