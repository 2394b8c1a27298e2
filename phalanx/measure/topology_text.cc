// describe(): the topology as lines of text.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "phalanx/base/cpu_list.h"
#include "phalanx/base/human.h"
#include "phalanx/measure/topology.h"

namespace phalanx::measure {
namespace {

std::string plural(std::size_t count, const std::string& thing) {
  return fmt::format("{} {}{}", count, thing, count == 1 ? "" : "s");
}

/// One line for each kind and size of cache.
std::string caches_text(const Topology& machine) {
  std::string text;
  std::map<std::tuple<int, std::string, std::uint64_t, std::size_t>, std::size_t> kinds;
  for (const Cache& cache : machine.caches) ++kinds[{cache.level, cache.type, cache.bytes, cache.cpus.size()}];
  for (const auto& [kind, count] : kinds) {
    const auto& [level, type, bytes, sharing] = kind;
    const std::string name = fmt::format("L{}{}", level, type == "Data" ? "d" : type == "Instruction" ? "i" : "");
    text += fmt::format("  {:<4} {:>9}  x {}, {} each\n", name, human_bytes(bytes), count, plural(sharing, "CPU"));
  }
  return text;
}

std::string nodes_text(const Topology& machine) {
  std::string text;
  for (const NumaNode& node : machine.nodes) {
    text += fmt::format("  node {:<3} CPUs {:<12} {:>9}, {} free", node.id,
                        node.cpus.empty() ? "none" : cpu_list_text(node.cpus), human_bytes(node.bytes),
                        human_bytes(node.free_bytes));
    if (machine.nodes.size() > 1) {
      text += fmt::format("   distance");
      for (const int distance : node.distances) text += fmt::format(" {:>3}", distance);
    }
    text += "\n";
  }
  return text;
}

std::string network_text(const Topology& machine) {
  std::string text;
  for (const NetworkDevice& device : machine.network) {
    std::string addresses;
    for (const std::string& address : device.addresses) addresses += (addresses.empty() ? "" : ", ") + address;
    const std::string speed = !device.megabits               ? "speed not known"
                              : *device.megabits % 1000 == 0 ? fmt::format("{} Gbit/s", *device.megabits / 1000)
                                                             : fmt::format("{} Mbit/s", *device.megabits);
    text += fmt::format("  {:<10} {:<10} {:<8} {:<16} mtu {:<6}", device.name, device.kind, device.state, speed,
                        device.mtu);
    if (device.numa_node) text += fmt::format(" node {}", *device.numa_node);
    if (!device.driver.empty()) text += fmt::format(" {}", device.driver);
    text += fmt::format("  {}\n", addresses.empty() ? "no address" : addresses);
  }
  for (const InfinibandPort& port : machine.infiniband) {
    text += fmt::format("  {:<10} {:<10} {:<8} {} (port {})\n", port.device, port.link_layer, port.state, port.rate,
                        port.port);
  }
  return text;
}

}  // namespace

std::string describe(const Topology& machine) {
  std::string text = fmt::format("Processors\n  {}\n", machine.cpu_model);
  if (!machine.cpus.empty()) {
    text += fmt::format("  {}, {}, {} each: {}\n", plural(static_cast<std::size_t>(machine.packages()), "socket"),
                        plural(static_cast<std::size_t>(machine.cores()), "core"),
                        plural(static_cast<std::size_t>(machine.threads_per_core()), "hardware thread"),
                        plural(machine.cpus.size(), "CPU"));
  }
  const std::string caches = caches_text(machine);
  text += caches.empty() ? "  the kernel tells nothing of the caches\n" : caches;
  text += "NUMA nodes\n";
  text += machine.nodes.empty() ? "  the kernel tells of none\n" : nodes_text(machine);
  text += "Network\n";
  const std::string network = network_text(machine);
  return text + (network.empty() ? "  no devices\n" : network);
}

}  // namespace phalanx::measure
