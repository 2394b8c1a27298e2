// How fast each level of the memory and link hierarchy is, measured in well under a second each. Torch-free.
//
// Memory: memcpy between two private buffers that together fill half of the level (L1, L2, L3) or exceed the last cache
// four times (memory); by one CPU, then by all usable ones at once, each on its own thread bound to it and with its own
// buffers (those of a shared cache split it). Speeds count each copied byte once, in bytes per second.
//
// NUMA nodes: the same copies by one CPU of each node within the memory of each node.
//
// Links: two processes of this machine. Shared memory: one copies into a ring of two slots, the other out of it, which
// is what a shm collective does. Loopback: one TCP connection over 127.0.0.1. Both also bounce one small message: half
// of the round trip is the latency.
//
//   for (const MemoryLevel& level : measure_memory(machine)) ...
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
  std::uint64_t buffer_bytes = 0;  // of each of the two, for one CPU alone
  double one_cpu = 0;              // bytes per second
  double all_cpus = 0;             // of all together
  int cpus = 1;                    // that took part in all_cpus
};

/// Speeds between the machine's NUMA nodes: row i, column j is a CPU of cpu_nodes[i] copying within memory_nodes[j].
struct NumaSpeeds {
  std::vector<int> cpu_nodes;     // that have a CPU this process may use
  std::vector<int> memory_nodes;  // that have memory
  std::vector<std::vector<double>> bytes_per_second;
};

struct LinkSpeed {
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

/// The buffers for a level: what there is to split between `sharing` CPUs, each with two. Nothing is measured.
std::uint64_t copy_buffer_bytes(std::uint64_t level_bytes, std::size_t sharing);

std::vector<MemoryLevel> measure_memory(const Topology& machine,
                                        std::chrono::milliseconds each = std::chrono::milliseconds(60));

/// Throws Error where the system does not let this process choose the node of its memory, or has none left there.
NumaSpeeds measure_numa(const Topology& machine, std::chrono::milliseconds each = std::chrono::milliseconds(60));

/// Throw Error if the process cannot be started or the system refuses memory or sockets. The helper process never
/// outlives the call.
LinkSpeed measure_shared_memory(std::uint64_t bytes = std::uint64_t{256} << 20);
LinkSpeed measure_loopback(std::uint64_t bytes = std::uint64_t{256} << 20);

}  // namespace phalanx::measure
