#include "phalanx/launch/supervisor/cpu_binding.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>
#include <map>
#include <string_view>

#include "phalanx/base/cpu_list.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/log.h"
#include "phalanx/base/nearest.h"
#include "phalanx/launch/supervisor/visible_gpus.h"

namespace phalanx {
namespace {

using Cpus = std::vector<int>;
namespace stdfs = std::filesystem;

std::string text_of(const stdfs::path& path) {
  try {
    std::string text = read_file(path, 1 << 20);
    text.erase(text.find_last_not_of(" \t\r\n") + 1);
    return text;
  } catch (const FileError&) {  // this node does not report it
    return "";
  }
}

int number_of(const stdfs::path& path, int otherwise) {
  const std::string text = text_of(path);
  int number = otherwise;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

Cpus list_of(const stdfs::path& path) {
  const std::string text = text_of(path);
  return text.empty() ? Cpus{} : parse_cpu_list(path.string(), text);
}

Cpus both(const Cpus& a, const Cpus& b) {
  Cpus result;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(result));
  return result;
}

Cpus affinity_of_this_process() {
  for (int bits = 1024; bits <= (1 << 20); bits *= 2) {
    cpu_set_t* const set = CPU_ALLOC(static_cast<std::size_t>(bits));
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(bits));
    Cpus cpus;
    const bool known = set != nullptr && sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; known && cpu < bits; ++cpu)
      if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set)) cpus.push_back(cpu);
    CPU_FREE(set);
    if (known) return cpus;
  }
  throw Error("sched_getaffinity: this node's CPU mask is too wide");
}

struct Gpu {
  std::string address, uuid;
  int numa_node = 0;
};

// The CPUs, NUMA nodes and GPUs of this machine, limited to the allowed CPUs.
class Topology {
 public:
  Topology(stdfs::path root, const Cpus& allowed) : root_(std::move(root)) {
    std::error_code error;
    for (const auto& entry : stdfs::directory_iterator(root_ / "sys/devices/system/node", error)) {
      const std::string name = entry.path().filename().string();
      if (name.size() < 5 || !name.starts_with("node") || std::isdigit(static_cast<unsigned char>(name[4])) == 0)
        continue;
      const Cpus cpus = both(list_of(entry.path() / "cpulist"), allowed);
      if (!cpus.empty()) nodes_[std::stoi(name.substr(4))] = cpus;
    }
    if (nodes_.empty()) nodes_[0] = allowed;
    find_gpus();
  }
  const std::map<int, Cpus>& nodes() const { return nodes_; }
  const std::vector<Gpu>& gpus() const { return gpus_; }

  int socket_of(int cpu) const { return number_of(cpu_folder(cpu) / "topology/physical_package_id", 0); }
  // The first CPU of the same core.
  int core_of(int cpu) const {
    const Cpus siblings = list_of(cpu_folder(cpu) / "topology/thread_siblings_list");
    return siblings.empty() ? cpu : siblings.front();
  }
  // The first CPU with the same last-level cache.
  int cache_of(int cpu) const {
    int level = -1, first = cpu;
    std::error_code error;
    for (const auto& entry : stdfs::directory_iterator(cpu_folder(cpu) / "cache", error)) {
      if (!entry.path().filename().string().starts_with("index")) continue;
      const std::string type = text_of(entry.path() / "type");
      const int found = number_of(entry.path() / "level", -1);
      const Cpus shared = list_of(entry.path() / "shared_cpu_list");
      if ((type != "Unified" && type != "Data") || found <= level || shared.empty()) continue;
      level = found;
      first = shared.front();
    }
    return first;
  }

 private:
  stdfs::path cpu_folder(int cpu) const { return root_ / fmt::format("sys/devices/system/cpu/cpu{}", cpu); }

  // NVIDIA's display and 3D controllers, in the order of their PCI addresses.
  void find_gpus() {
    std::error_code error;
    for (const auto& entry : stdfs::directory_iterator(root_ / "sys/bus/pci/devices", error)) {
      if (text_of(entry.path() / "vendor") != "0x10de" || !text_of(entry.path() / "class").starts_with("0x03"))
        continue;
      Gpu gpu;
      gpu.address = entry.path().filename().string();
      gpu.numa_node = std::max(0, number_of(entry.path() / "numa_node", 0));  // -1: there is only one NUMA node
      const std::string information = text_of(root_ / "proc/driver/nvidia/gpus" / gpu.address / "information");
      if (const std::size_t at = information.find("GPU-"); at != std::string::npos)
        gpu.uuid = information.substr(at, information.find_first_of(" \n", at) - at);
      gpus_.push_back(std::move(gpu));
    }
    std::sort(gpus_.begin(), gpus_.end(), [](const Gpu& a, const Gpu& b) { return a.address < b.address; });
  }

  stdfs::path root_;
  std::map<int, Cpus> nodes_;
  std::vector<Gpu> gpus_;
};

// The visible GPUs in their order, by CUDA's rules. Empty if they cannot be identified: the name of a MIG instance may
// be a number with another meaning.
std::vector<Gpu> visible_gpus(const Topology& topology, const EnvironmentMap& environment, const stdfs::path& root) {
  const auto variable = environment.find("CUDA_VISIBLE_DEVICES");
  if (variable == environment.end()) return topology.gpus();
  const auto& gpus = topology.gpus();
  std::vector<Gpu> result;
  for (const std::string& entry : listed_gpus(variable->second, root)) {
    int index = -1;
    const auto [end, error] = std::from_chars(entry.data(), entry.data() + entry.size(), index);
    const bool is_index = error == std::errc{} && end == entry.data() + entry.size();
    const bool is_mig = entry.starts_with("MIG-");
    const auto found = std::find_if(gpus.begin(), gpus.end(), [&](const Gpu& gpu) {
      if (is_index) return index == &gpu - gpus.data();
      if (is_mig) return gpus.size() == 1 || (!gpu.uuid.empty() && entry.starts_with("MIG-" + gpu.uuid + "/"));
      return gpu.uuid.starts_with(entry);
    });
    if (found != gpus.end()) {
      result.push_back(*found);
    } else if (is_mig) {
      log::warn(
          fmt::format("--numa-binding: of which GPU '{}' is a part (CUDA_VISIBLE_DEVICES) is not known here: the "
                      "ranks share this node's NUMA nodes as without GPUs; --cpu-binding lists CPUs for each",
                      entry));
      return {};
    } else {
      break;  // by CUDA's rules the following entries are not visible
    }
  }
  return result;
}

std::vector<int> homes_of(const Topology& topology, int ranks, const EnvironmentMap& environment,
                          const stdfs::path& root) {
  const auto gpus = visible_gpus(topology, environment, root);
  std::vector<int> homes;
  const auto& nodes = topology.nodes();
  for (int rank = 0; rank < ranks; ++rank) {
    if (gpus.empty()) {
      const auto share = static_cast<std::size_t>(rank) * nodes.size() / static_cast<std::size_t>(ranks);
      homes.push_back(std::next(nodes.begin(), static_cast<std::ptrdiff_t>(share))->first);
      continue;
    }
    const Gpu& gpu = gpus[static_cast<std::size_t>(rank) % gpus.size()];
    if (!nodes.contains(gpu.numa_node))
      throw UsageError(
          fmt::format("--numa-binding: local rank {} computes on the GPU {} of NUMA node {}, and this process "
                      "may use none of that node's CPUs",
                      rank, gpu.address, gpu.numa_node));
    homes.push_back(gpu.numa_node);
  }
  return homes;
}

Cpus socket_cpus(const Topology& topology, int home) {
  const int socket = topology.socket_of(topology.nodes().at(home).front());
  Cpus result;
  for (const auto& [node, cpus] : topology.nodes())
    if (topology.socket_of(cpus.front()) == socket) result.insert(result.end(), cpus.begin(), cpus.end());
  std::sort(result.begin(), result.end());
  return result;
}

// The CPUs of rank number `place` of the `count` ranks on this NUMA node.
Cpus exclusive_cpus(const Topology& topology, int home, int place, int count) {
  std::map<int, Cpus> cores;
  for (const int cpu : topology.nodes().at(home)) cores[topology.core_of(cpu)].push_back(cpu);
  const int total = static_cast<int>(cores.size());
  if (total < count)
    throw UsageError(fmt::format(
        "--numa-binding exclusive: {} ranks share NUMA node {}, which has {} core{} that this process may use: "
        "start fewer ranks, or choose node",
        count, home, total, total == 1 ? "" : "s"));
  // If the cores cannot be divided evenly, the first ranks get one more.
  const int begin = place * (total / count) + std::min(place, total % count);
  const int size = total / count + (place < total % count ? 1 : 0);
  Cpus result;
  int index = 0;
  for (const auto& [core, cpus] : cores) {
    if (index >= begin && index < begin + size) result.insert(result.end(), cpus.begin(), cpus.end());
    ++index;
  }
  std::sort(result.begin(), result.end());
  return result;
}

Cpus complex_cpus(const Topology& topology, int home, int place) {
  std::map<int, Cpus> by_cache;
  for (const int cpu : topology.nodes().at(home)) by_cache[topology.cache_of(cpu)].push_back(cpu);
  std::vector<Cpus> complexes;
  for (auto& [cache, cpus] : by_cache) complexes.push_back(std::move(cpus));
  std::stable_sort(complexes.begin(), complexes.end(),
                   [](const Cpus& a, const Cpus& b) { return a.size() > b.size(); });
  return complexes[static_cast<std::size_t>(place) % complexes.size()];
}

std::vector<Cpus> listed_cpus(const CpuBindingOptions& options, int ranks, const Cpus& allowed) {
  if (options.lists.size() != static_cast<std::size_t>(ranks))
    throw UsageError(fmt::format("--cpu-binding lists the CPUs of {} ranks: expected {}, one list for each local rank",
                                 options.lists.size(), ranks));
  for (const Cpus& list : options.lists) {
    const Cpus usable = both(list, allowed);
    if (usable.size() != list.size())
      throw UsageError(fmt::format("--cpu-binding: of the CPUs {} this process may use {}; all that it may use: {}",
                                   cpu_list_text(list), usable.empty() ? "none" : cpu_list_text(usable),
                                   cpu_list_text(allowed)));
  }
  return options.lists;
}

}  // namespace

NumaBinding parse_numa_binding(const std::string& flag, const std::string& text) {
  const std::vector<std::string> names{"node", "socket", "exclusive", "core-complex"};
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end())
    throw UsageError(fmt::format("{} is '{}'{}: expected node, socket, exclusive or core-complex", flag, text,
                                 did_you_mean(text, names)));
  return static_cast<NumaBinding>(1 + (found - names.begin()));
}

std::vector<int> parse_cpu_list(const std::string& what, const std::string& text) {
  const auto cpus = cpus_in_list(text);
  if (!cpus || cpus->empty())
    throw UsageError(fmt::format("{} is '{}': expected CPU numbers such as 0-3,8", what, text));
  return *cpus;
}

std::vector<std::vector<int>> bind_ranks(const CpuBindingOptions& options, int ranks,
                                         const EnvironmentMap& environment) {
  Cpus allowed = options.allowed ? *options.allowed : affinity_of_this_process();
  std::sort(allowed.begin(), allowed.end());
  if (!options.lists.empty()) return listed_cpus(options, ranks, allowed);
  const Topology topology(options.root, allowed);
  const auto homes = homes_of(topology, ranks, environment, options.root);
  std::vector<Cpus> result;
  std::map<int, int> places;  // for each NUMA node: how many ranks have their CPUs
  for (const int home : homes) {
    const int place = places[home]++;
    const int count = static_cast<int>(std::count(homes.begin(), homes.end(), home));
    switch (options.mode) {
      case NumaBinding::socket:
        result.push_back(socket_cpus(topology, home));
        break;
      case NumaBinding::exclusive:
        result.push_back(exclusive_cpus(topology, home, place, count));
        break;
      case NumaBinding::core_complex:
        result.push_back(complex_cpus(topology, home, place));
        break;
      default:
        result.push_back(topology.nodes().at(home));
    }
  }
  return result;
}

int cores_for_rank(const std::vector<std::vector<int>>& cpus, int local_rank) {
  double cores = 0;
  for (const int cpu : cpus[static_cast<std::size_t>(local_rank)]) {
    const auto sharers = std::count_if(
        cpus.begin(), cpus.end(), [&](const auto& list) { return std::binary_search(list.begin(), list.end(), cpu); });
    cores += 1.0 / static_cast<double>(sharers);
  }
  return std::max(1, static_cast<int>(cores + 1e-9));
}

}  // namespace phalanx
