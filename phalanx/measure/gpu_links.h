// The GPUs of this machine and how they are linked, as nvidia-smi tells it (it comes with the driver). Torch-free.
//
//   const GpuLinks gpus = read_gpu_links();
//   if (!gpus.problem.empty()) ...      // "nvidia-smi is not installed": nothing is known, which is no error
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace phalanx::measure {

struct Gpu {
  int index = 0;
  std::string name;
  std::string bus_id;
  std::uint64_t bytes = 0;
  std::string pcie;  // "gen 5 x16": of the link as it is now
};

/// As `nvidia-smi topo -m` prints it: X itself, NV<n> n NVLinks, PIX/PXB one or several PCIe bridges, PHB the host
/// bridge, NODE within a NUMA node, SYS across.
struct LinkMatrix {
  std::vector<std::string> names;               // "GPU0", ..., "NIC0", ...: rows and columns
  std::vector<std::vector<std::string>> cells;  // names.size() squared
  std::vector<std::string> remarks;             // of each row: its CPU and NUMA affinity
  std::vector<std::string> nics;                // "NIC0: mlx5_0"
};

struct GpuLinks {
  std::vector<Gpu> gpus;
  LinkMatrix matrix;
  std::string problem;  // why there is nothing, or not all
};

/// Runs the program (found in PATH unless it has a slash) at most twice, each for at most `limit`.
GpuLinks read_gpu_links(const std::string& program = "nvidia-smi",
                        std::chrono::milliseconds limit = std::chrono::seconds(20));

std::vector<Gpu> parse_gpu_list(const std::string& csv);  // of --query-gpu=index,name,pci.bus_id,memory.total,...
LinkMatrix parse_link_matrix(const std::string& text);

std::string describe(const GpuLinks& gpus);

/// Standard output of a program. Throws Error: it cannot be started, fails, or takes longer (then it is killed).
std::string output_of(const std::vector<std::string>& command, std::chrono::milliseconds limit);

}  // namespace phalanx::measure
