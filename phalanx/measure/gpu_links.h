// The GPUs of this machine and their links, as reported by nvidia-smi, which comes with the driver. Torch-free.
//
//   const GpuLinks gpus = read_gpu_links();
//   if (!gpus.problem.empty()) log::info(gpus.problem);  // "nvidia-smi is not installed": no data, but not an error
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
  std::string pcie;  // "gen 5 x16": the current state of the link
};

/// The matrix of `nvidia-smi topo -m`. X: the device itself; NV<n>: n NVLinks; PIX and PXB: one or several PCIe
/// bridges; PHB: the host bridge; NODE: within a NUMA node; SYS: across NUMA nodes.
struct LinkMatrix {
  std::vector<std::string> names;               // "GPU0", ..., "NIC0", ...: rows and columns
  std::vector<std::vector<std::string>> cells;  // names.size() squared
  std::vector<std::string> remarks;             // of each row: its CPU and NUMA affinity
  std::vector<std::string> nics;                // "NIC0: mlx5_0"
};

struct GpuLinks {
  std::vector<Gpu> gpus;
  LinkMatrix matrix;
  std::string problem;  // why data is missing; empty: none is
};

/// Runs the program (searched in PATH unless it has a slash) at most twice, each time for at most `limit`.
GpuLinks read_gpu_links(const std::string& program = "nvidia-smi",
                        std::chrono::milliseconds limit = std::chrono::seconds(20));

std::vector<Gpu> parse_gpu_list(const std::string& csv);  // of --query-gpu=index,name,pci.bus_id,memory.total,...
LinkMatrix parse_link_matrix(const std::string& text);

std::string describe(const GpuLinks& gpus);

/// Runs a program and returns its standard output. Throws Error if the program cannot be started, fails, or takes
/// longer than `limit`; in the last case it is killed.
std::string output_of(const std::vector<std::string>& command, std::chrono::milliseconds limit);

}  // namespace phalanx::measure
