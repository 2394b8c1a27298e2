// Measures the speed of each level of the memory and link hierarchy, in well under a second each. Torch-free.
//
// Memory: memcpy between two private buffers. Together they fill half of the level (L1, L2, L3), or are four times as
// large as the last cache (memory). It is measured with one CPU, then with all usable CPUs at once. Each CPU has a
// bound thread and two buffers; CPUs that share a cache split it. Speeds are in bytes per second and count each copied
// byte once.
//
// NUMA nodes: the same copies, by one CPU of each NUMA node within the memory of each NUMA node.
//
// Links: between two processes of this machine. Shared memory: one process copies into a ring of two slots, and the
// other copies out of it, as a shm collective does. Loopback: one TCP connection over 127.0.0.1. Both also bounce one
// small message; the latency is half of the round trip.
//
//   const Topology machine = read_topology();
//   for (const MemoryLevel& level : measure_memory(machine)) fmt::print("{}\n", level.name);
//   const LinkSpeed shared = measure_shared_memory();
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/measure/topology.h"

namespace phalanx::measure {

struct MemoryLevel {
  std::string name;                // "L1", "L2", "L3", "memory"
  std::uint64_t buffer_bytes = 0;  // of each of the two buffers, for one CPU alone
  double one_cpu = 0;              // bytes per second
  double all_cpus = 0;             // bytes per second of all CPUs together
  int cpus = 1;                    // number of CPUs in all_cpus
};

/// Speeds between the machine's NUMA nodes: row i, column j is a CPU of cpu_nodes[i] copying within memory_nodes[j].
struct NumaSpeeds {
  std::vector<int> cpu_nodes;     // nodes with a CPU that this process may use
  std::vector<int> memory_nodes;  // nodes with memory
  std::vector<std::vector<double>> bytes_per_second;
};

struct LinkSpeed {
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

/// The size of one buffer if `sharing` CPUs, with two buffers each, split a level of `level_bytes`. Measures nothing.
std::uint64_t copy_buffer_bytes(std::uint64_t level_bytes, std::size_t sharing);

std::vector<MemoryLevel> measure_memory(const Topology& machine,
                                        std::chrono::milliseconds each = std::chrono::milliseconds(60));

/// Throws Error if the system does not let this process choose the NUMA node of its memory, or has no memory left
/// there.
NumaSpeeds measure_numa(const Topology& machine, std::chrono::milliseconds each = std::chrono::milliseconds(60));

/// Both throw Error if the helper process cannot be started or the system refuses memory or sockets. The helper process
/// never outlives the call.
LinkSpeed measure_shared_memory(std::uint64_t bytes = std::uint64_t{256} << 20);
LinkSpeed measure_loopback(std::uint64_t bytes = std::uint64_t{256} << 20);

}  // namespace phalanx::measure
