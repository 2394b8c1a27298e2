// The hardware of this machine as reported by the kernel: processors and caches, NUMA nodes, network devices.
// Torch-free. GPUs and their links: gpu_links.h. The speed of each level: bandwidth.h.
//
//   const Topology machine = read_topology();
//   fmt::print("{}", describe(machine));
//
// What the kernel does not report (a virtual machine without cache sizes, a container without /sys) is left empty.
// Nothing is guessed, and nothing is thrown.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace phalanx::measure {

struct Cpu {
  int id = 0;       // the kernel's number, as in taskset
  int package = 0;  // socket
  int core = 0;     // within the package; CPUs with the same core are its hardware threads
};

struct Cache {
  int level = 0;
  std::string type;  // "Data", "Instruction", "Unified"
  std::uint64_t bytes = 0;
  std::vector<int> cpus;  // CPUs that share it
};

struct NumaNode {
  int id = 0;
  std::vector<int> cpus;
  std::uint64_t bytes = 0, free_bytes = 0;
  std::vector<int> distances;  // to each NUMA node, in their order; 10 is local
};

struct NetworkDevice {
  std::string name;
  std::string kind;   // "loopback", "ethernet", "infiniband", "virtual" (no hardware of this machine), ...
  std::string state;  // the kernel's operstate: "up", "down", "unknown"
  std::optional<std::int64_t> megabits;
  int mtu = 0;
  std::string driver;
  std::optional<int> numa_node;
  std::vector<std::string> addresses;
};

struct InfinibandPort {
  std::string device;
  int port = 0;
  std::string state, rate, link_layer;  // "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"
};

struct Topology {
  std::string cpu_model;
  std::vector<Cpu> cpus;      // online
  std::vector<Cache> caches;  // each once, by level, then first CPU
  std::vector<NumaNode> nodes;
  std::vector<NetworkDevice> network;
  std::vector<InfinibandPort> infiniband;

  int packages() const;
  int cores() const;             // without hardware threads
  int threads_per_core() const;  // of the core with the most
  /// The size of the data cache of that level that a CPU uses; 0 if there is none or its size is unknown.
  std::uint64_t cache_bytes(int level, int cpu) const;
};

using InterfaceAddresses = std::map<std::string, std::vector<std::string>>;  // by interface

/// Tests replace "/" in /sys and /proc by `root`, and then also pass the addresses.
Topology read_topology(const std::filesystem::path& root = "/", std::optional<InterfaceAddresses> addresses = {});

std::string cpu_model(const std::filesystem::path& root = "/");

/// Several lines of text, as `phalanx doctor --topology` prints them.
std::string describe(const Topology& topology);

}  // namespace phalanx::measure
