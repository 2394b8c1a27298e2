#include "phalanx/measure/topology.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "phalanx/base/cpu.h"
#include "phalanx/base/cpu_list.h"

namespace phalanx::measure {
namespace {

namespace stdfs = std::filesystem;

std::string line_of(const stdfs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && (line.back() == ' ' || line.back() == '\t')) line.pop_back();
  return line;
}

std::optional<std::int64_t> number_of(const std::string& text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || rest != end || text.empty()) return std::nullopt;
  return value;
}

/// The entries named prefix0, prefix1, ... and their numbers, in order.
std::vector<std::pair<int, stdfs::path>> numbered(const stdfs::path& folder, const std::string& prefix) {
  std::vector<std::pair<int, stdfs::path>> found;
  std::error_code error;
  for (const auto& entry : stdfs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix)) continue;
    if (const auto number = number_of(name.substr(prefix.size()))) {
      found.emplace_back(static_cast<int>(*number), entry.path());
    }
  }
  std::ranges::sort(found);
  return found;
}

std::vector<std::string> names_in(const stdfs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : stdfs::directory_iterator(folder, error)) names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

// Empty if the file is missing or contains something else.
std::vector<int> cpus_in(const stdfs::path& file) { return cpus_in_list(line_of(file)).value_or(std::vector<int>{}); }

void read_cpus(const stdfs::path& root, Topology& machine) {
  const stdfs::path folder = root / "sys/devices/system/cpu";
  const std::vector<int> online = cpus_in(folder / "online");
  for (const auto& [id, path] : numbered(folder, "cpu")) {
    if (!online.empty() && std::ranges::find(online, id) == online.end()) continue;
    machine.cpus.push_back(
        {.id = id,
         .package = static_cast<int>(number_of(line_of(path / "topology/physical_package_id")).value_or(0)),
         .core = static_cast<int>(number_of(line_of(path / "topology/core_id")).value_or(id))});
    for (const auto& [index, cache_path] : numbered(path / "cache", "index")) {
      Cache cache{.level = static_cast<int>(number_of(line_of(cache_path / "level")).value_or(0)),
                  .type = line_of(cache_path / "type"),
                  .bytes = parse_cache_bytes(line_of(cache_path / "size")),
                  .cpus = cpus_in(cache_path / "shared_cpu_list")};
      if (cache.cpus.empty()) cache.cpus = {id};
      // Every CPU of a cache lists it; only the entry of the first CPU is used.
      if (cache.cpus.front() == id && cache.bytes > 0) machine.caches.push_back(std::move(cache));
    }
  }
  std::ranges::stable_sort(machine.caches, {}, [](const Cache& c) { return std::pair(c.level, c.type); });
}

void read_nodes(const stdfs::path& root, Topology& machine) {
  for (const auto& [id, path] : numbered(root / "sys/devices/system/node", "node")) {
    NumaNode node{.id = id, .cpus = cpus_in(path / "cpulist")};
    std::ifstream memory(path / "meminfo");  // "Node 0 MemTotal:  16300000 kB"
    for (std::string line; std::getline(memory, line);) {
      std::istringstream words(line);
      std::string skip, key;
      std::uint64_t kilobytes = 0;
      if (!(words >> skip >> skip >> key >> kilobytes)) continue;
      if (key == "MemTotal:") node.bytes = kilobytes << 10;
      if (key == "MemFree:") node.free_bytes = kilobytes << 10;
    }
    std::istringstream distances(line_of(path / "distance"));
    for (int distance = 0; distances >> distance;) node.distances.push_back(distance);
    machine.nodes.push_back(std::move(node));
  }
}

std::string link_target_name(const stdfs::path& link) {
  std::error_code error;
  const stdfs::path target = stdfs::read_symlink(link, error);
  return error ? "" : target.filename().string();
}

std::string kind_of_link(const stdfs::path& device, const std::string& type) {
  if (type == "772") return "loopback";
  if (type == "32") return "infiniband";
  if (stdfs::exists(device / "wireless")) return "wireless";
  if (!stdfs::exists(device / "device")) return "virtual";
  return type == "1" ? "ethernet" : "type " + type;
}

void read_network(const stdfs::path& root, const InterfaceAddresses& addresses, Topology& machine) {
  const stdfs::path folder = root / "sys/class/net";
  for (const std::string& name : names_in(folder)) {
    const stdfs::path path = folder / name;
    if (!stdfs::is_directory(path)) continue;  // bonding_masters is a file
    NetworkDevice device{.name = name,
                         .kind = kind_of_link(path, line_of(path / "type")),
                         .state = line_of(path / "operstate"),
                         .mtu = static_cast<int>(number_of(line_of(path / "mtu")).value_or(0)),
                         .driver = link_target_name(path / "device/driver")};
    // A link that is down or has no speed reads as -1 or cannot be read.
    const auto speed = number_of(line_of(path / "speed"));
    if (speed && *speed > 0 && *speed < 100'000'000) device.megabits = speed;
    const auto node = number_of(line_of(path / "device/numa_node"));
    if (node && *node >= 0) device.numa_node = static_cast<int>(*node);
    if (const auto found = addresses.find(name); found != addresses.end()) device.addresses = found->second;
    machine.network.push_back(std::move(device));
  }
  // "4: ACTIVE", "400 Gb/sec (4X NDR)"
  for (const std::string& name : names_in(root / "sys/class/infiniband")) {
    for (const auto& [port, path] : numbered(root / "sys/class/infiniband" / name / "ports", "")) {
      std::string state = line_of(path / "state");
      if (const auto colon = state.find(": "); colon != std::string::npos) state.erase(0, colon + 2);
      machine.infiniband.push_back({name, port, state, line_of(path / "rate"), line_of(path / "link_layer")});
    }
  }
}

InterfaceAddresses system_addresses() {
  InterfaceAddresses result;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return result;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    char text[INET6_ADDRSTRLEN] = "";
    const int family = entry->ifa_addr->sa_family;
    if (family == AF_INET) {
      inet_ntop(family, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, text, sizeof text);
    } else if (family == AF_INET6) {
      inet_ntop(family, &reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr, text, sizeof text);
    }
    if (text[0] != '\0') result[entry->ifa_name].emplace_back(text);
  }
  freeifaddrs(list);
  return result;
}

}  // namespace

int Topology::packages() const {
  std::set<int> distinct;
  for (const Cpu& cpu : cpus) distinct.insert(cpu.package);
  return static_cast<int>(distinct.size());
}

int Topology::cores() const {
  std::set<std::pair<int, int>> distinct;
  for (const Cpu& cpu : cpus) distinct.insert({cpu.package, cpu.core});
  return static_cast<int>(distinct.size());
}

int Topology::threads_per_core() const {
  std::map<std::pair<int, int>, int> threads;
  int most = 0;
  for (const Cpu& cpu : cpus) most = std::max(most, ++threads[{cpu.package, cpu.core}]);
  return most;
}

std::uint64_t Topology::cache_bytes(int level, int cpu) const {
  for (const Cache& cache : caches) {
    if (cache.level == level && cache.type != "Instruction" && std::ranges::find(cache.cpus, cpu) != cache.cpus.end()) {
      return cache.bytes;
    }
  }
  return 0;
}

Topology read_topology(const stdfs::path& root, std::optional<InterfaceAddresses> addresses) {
  Topology machine;
  machine.cpu_model = cpu_model(root);
  read_cpus(root, machine);
  read_nodes(root, machine);
  read_network(root, addresses ? *addresses : system_addresses(), machine);
  return machine;
}

std::string cpu_model(const stdfs::path& root) {
  std::ifstream file(root / "proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU of unknown model";
}

}  // namespace phalanx::measure
