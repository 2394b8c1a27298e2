// CPU binding: which CPUs each local rank may run on. Torch-free. It reads /sys and /proc below a root folder, which
// tests replace.
//
// The modes are those of torchrun's --numa-binding. Each rank has a home NUMA node. It is the node of the rank's GPU
// (entry LOCAL_RANK of the visible GPUs; visible_gpus.h). Without GPUs the ranks are divided evenly among the NUMA
// nodes, in order. GPUs are numbered by their PCI addresses. CUDA does the same if all GPUs are of one kind, and always
// with CUDA_DEVICE_ORDER=PCI_BUS_ID.
//   node           all CPUs of the home
//   socket         all CPUs of every NUMA node on the home's socket
//   exclusive      an even share of the home's physical cores, with all their threads; no two ranks share a core
//   core-complex   the cores around one last-level cache of the home; each rank gets another cache while there are any
// Alternatively the CPUs of each rank are listed. Only CPUs that this process may use are assigned.
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

/// Parses "node", "socket", "exclusive" or "core-complex". Throws UsageError; the error names `flag`.
NumaBinding parse_numa_binding(const std::string& flag, const std::string& text);

struct CpuBindingOptions {
  NumaBinding mode = NumaBinding::none;
  std::vector<std::vector<int>> lists;  // the CPUs of each local rank; used instead of a mode
  std::filesystem::path root = "/";
  std::optional<std::vector<int>> allowed;  // unset: this process's affinity mask
  bool is_set() const { return mode != NumaBinding::none || !lists.empty(); }
};

/// The CPUs of every local rank, in ascending order. Throws UsageError if this machine cannot be divided that way.
std::vector<std::vector<int>> bind_ranks(const CpuBindingOptions& options, int ranks,
                                         const EnvironmentMap& environment);

/// A good thread count for the rank: the number of its CPUs, where a CPU that n ranks share counts as 1/n; at least 1.
int cores_for_rank(const std::vector<std::vector<int>>& cpus, int local_rank);

/// "0-3,8" -> {0, 1, 2, 3, 8}. Throws UsageError; the error names `what`.
std::vector<int> parse_cpu_list(const std::string& what, const std::string& text);

}  // namespace phalanx
