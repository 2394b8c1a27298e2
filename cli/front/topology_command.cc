#include "cli/front/topology_command.h"

#include <fmt/format.h>

#include <cstdio>
#include <functional>

#include "cli/parse_options.h"
#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/measure/bandwidth.h"
#include "phalanx/measure/gpu_copy.h"
#include "phalanx/measure/gpu_links.h"
#include "phalanx/measure/topology.h"

namespace phalanx::cli {
namespace {

void print_memory(const measure::Topology& machine) {
  const auto levels = measure::measure_memory(machine);
  fmt::print("Measured: copies by memcpy, each byte counted once\n  {:<10} {:>12} {:>12} {:>12}\n", "level", "buffer",
             "one CPU", fmt::format("all {}", levels.front().cpus));
  for (const measure::MemoryLevel& level : levels) {
    fmt::print("  {:<10} {:>12} {:>12} {:>12}\n", level.name, human_bytes(level.buffer_bytes),
               human_bytes_per_second(level.one_cpu), human_bytes_per_second(level.all_cpus));
  }
}

// With one NUMA node, copies between NUMA nodes give no information.
void print_numa(const measure::Topology& machine) {
  if (machine.nodes.size() < 2) return;
  fmt::print("Measured: copies by a CPU of the row's node within the memory of the column's\n");
  try {
    const measure::NumaSpeeds speeds = measure::measure_numa(machine);
    fmt::print("  {:<10}", "");
    for (const int node : speeds.memory_nodes) fmt::print(" {:>12}", fmt::format("node {}", node));
    fmt::print("\n");
    for (std::size_t i = 0; i < speeds.cpu_nodes.size(); ++i) {
      fmt::print("  {:<10}", fmt::format("node {}", speeds.cpu_nodes[i]));
      for (const double speed : speeds.bytes_per_second[i]) fmt::print(" {:>12}", human_bytes_per_second(speed));
      fmt::print("\n");
    }
  } catch (const Error& error) {
    fmt::print("  not measured: {}\n", error.what());
  }
}

void print_link(const char* name, const std::function<measure::LinkSpeed()>& measured) {
  try {
    const measure::LinkSpeed speed = measured();
    fmt::print("  {:<23} {:>12} {:>9.2f} us\n", name, human_bytes_per_second(speed.bytes_per_second),
               speed.latency_seconds * 1e6);
  } catch (const Error& error) {
    fmt::print("  {:<23} not measured: {}\n", name, error.what());
  }
}

void print_gpu_copies() {
  try {
    bool staged = false;
    for (const measure::GpuCopySpeed& speed : measure::measure_gpu_copies()) {
      fmt::print("  {:<23} {:>12}\n", speed.what, human_bytes_per_second(speed.bytes_per_second));
      staged = staged || speed.what.ends_with("staged");
    }
    if (staged) fmt::print("  staged: by way of host memory, as the driver gives the first no access to the second\n");
  } catch (const Error& error) {
    fmt::print("  GPU copies not measured: {}\n", error.what());
  }
}

}  // namespace

int topology_command(const Arguments& arguments) {
  bool only_facts = false;
  CLI::App app;
  app.add_flag("--topology");
  app.add_flag("--no-measure", only_facts);
  parse_options(app, arguments);
  const measure::Topology machine = measure::read_topology();
  fmt::print("{}", measure::describe(machine));
  const CpuLimits limits = cpu_limits();
  fmt::print("This process\n  may use {} of {} CPUs{}\n", limits.usable, limits.online,
             limits.quota ? fmt::format(" (cgroup quota {:.2g})", *limits.quota) : "");
  fmt::print("{}", measure::describe(measure::read_gpu_links()));
  std::fflush(stdout);
  if (only_facts) return 0;
  print_memory(machine);
  print_numa(machine);
  fmt::print("Measured: between two processes\n  {:<23} {:>12} {:>12}\n", "link", "speed", "latency");
  std::fflush(stdout);
  print_link("shared memory", [] { return measure::measure_shared_memory(); });
  print_link("loopback TCP", [] { return measure::measure_loopback(); });
  print_gpu_copies();
  fmt::print("Between nodes: phalanx bench comm --ops pingpong,sendrecv, in a job with ranks on each of them\n");
  return 0;
}

}  // namespace phalanx::cli
