#include "phalanx/base/cpu.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <string>

#include "phalanx/base/cpu_list.h"
#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/parse_text.h"

namespace phalanx {
namespace {

namespace stdfs = std::filesystem;

std::string contents_or_empty(const stdfs::path& path) {
  try {
    return read_file(path, 1 << 20);
  } catch (const FileError&) {  // absent: this kind of limit does not exist here
    return "";
  }
}

/// The mount point of a cgroup hierarchy, and the group that is visible there.
struct CgroupMount {
  stdfs::path root = "/";
  stdfs::path point;
};

bool has_controller(const std::string& list, const std::string& wanted) {
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    if (item == wanted) return true;
  }
  return false;
}

/// Format of a line: id parent device root mount-point options [tags...] - type source super-options
std::optional<CgroupMount> find_mount(const std::string& mountinfo, bool version2) {
  std::istringstream lines(mountinfo);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t separator = line.find(" - ");
    if (separator == std::string::npos) continue;
    std::istringstream head(line.substr(0, separator));
    std::istringstream tail(line.substr(separator + 3));
    std::string skip;
    std::string root;
    std::string point;
    std::string type;
    std::string source;
    std::string options;
    head >> skip >> skip >> skip >> root >> point;
    tail >> type >> source >> options;
    if (version2 ? type == "cgroup2" : (type == "cgroup" && has_controller(options, "cpu"))) {
      return CgroupMount{root, point};
    }
  }
  return std::nullopt;
}

/// This process's group in a hierarchy. Format of a line: hierarchy:controllers:path; version 2 has the line "0::path".
std::optional<stdfs::path> find_group(const std::string& cgroup, bool version2) {
  std::istringstream lines(cgroup);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (version2 ? controllers.empty() : has_controller(controllers, "cpu"))
      return stdfs::path(line.substr(second + 1));
  }
  return std::nullopt;
}

/// The quota of one group directory in cores, if it has a limit.
std::optional<double> quota_of(const stdfs::path& directory, bool version2) {
  double quota = 0;
  double period = 0;
  if (version2) {
    std::istringstream(contents_or_empty(directory / "cpu.max")) >> quota >> period;  // "max 100000" fails to parse
  } else {
    std::istringstream(contents_or_empty(directory / "cpu.cfs_quota_us")) >> quota;  // -1: no limit
    std::istringstream(contents_or_empty(directory / "cpu.cfs_period_us")) >> period;
  }
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

std::optional<double> smallest_quota(const stdfs::path& root, bool version2) {
  const std::optional<CgroupMount> mount = find_mount(contents_or_empty(root / "proc/self/mountinfo"), version2);
  const std::optional<stdfs::path> group = find_group(contents_or_empty(root / "proc/self/cgroup"), version2);
  if (!mount || !group) return std::nullopt;
  // Inside a container the mount may show only a subtree. A group outside of the subtree is the root of the mount
  // itself.
  stdfs::path below = group->lexically_relative(mount->root);
  if (below.empty() || *below.begin() == "..") below = ".";
  const stdfs::path top = root / mount->point.relative_path();
  std::optional<double> smallest;
  for (stdfs::path step = below;; step = step.parent_path()) {
    const std::optional<double> quota = quota_of(top / step, version2);
    if (quota && (!smallest || *quota < *smallest)) smallest = quota;
    if (step.empty() || step == ".") break;
  }
  const std::optional<double> at_top = quota_of(top, version2);
  if (at_top && (!smallest || *at_top < *smallest)) smallest = at_top;
  return smallest;
}

int cores_in_affinity_mask(int online) {
  // The kernel's mask may be wider than cpu_set_t on very large machines: grow until it fits.
  for (int cores = 1024; cores <= (1 << 20); cores *= 2) {
    cpu_set_t* const set = CPU_ALLOC(static_cast<std::size_t>(cores));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(cores));
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    const int count = known ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (known) return count;
  }
  return online;
}

}  // namespace

CpuLimits cpu_limits(const stdfs::path& root) {
  CpuLimits limits;
  limits.online = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  limits.affinity = std::max(1, cores_in_affinity_mask(limits.online));
  limits.quota = smallest_quota(root, /*version2=*/true);
  const std::optional<double> old_style = smallest_quota(root, /*version2=*/false);
  if (old_style && (!limits.quota || *old_style < *limits.quota)) limits.quota = old_style;
  limits.usable = limits.affinity;
  if (limits.quota && *limits.quota < limits.affinity) {
    limits.usable = std::max(1, static_cast<int>(std::ceil(*limits.quota - 1e-6)));
  }
  return limits;
}

int usable_cores() { return cpu_limits().usable; }

std::optional<int> threads_from_environment() {
  const std::optional<std::string> text = env_string("OMP_NUM_THREADS");
  if (!text) return std::nullopt;
  const int most = std::max(1024, 4 * cpu_limits().online);
  int threads = 0;
  for (const std::string& part : split_list(*text)) {
    int number = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
    if (error != std::errc() || end != part.data() + part.size() || number < 1 || number > most) {
      throw ConfigError(fmt::format(
          "OMP_NUM_THREADS is '{}': expected a number of threads from 1 to {}; unset it for one thread a core", *text,
          most));
    }
    if (threads == 0) threads = number;
  }
  return threads;
}

LastLevelCache last_level_cache(const stdfs::path& root) {
  LastLevelCache last;
  int last_level = 0;
  for (int index = 0;; ++index) {
    const stdfs::path folder = root / "sys/devices/system/cpu/cpu0/cache" / ("index" + std::to_string(index));
    int level = 0;
    if (!(std::istringstream(contents_or_empty(folder / "level")) >> level)) return last;
    std::string size;
    std::istringstream(contents_or_empty(folder / "size")) >> size;
    if (level <= last_level) continue;
    last_level = level;
    const auto cpus = cpus_in_list(contents_or_empty(folder / "shared_cpu_list"));
    last = {.bytes = parse_cache_bytes(size), .cores = std::max(1, cpus ? static_cast<int>(cpus->size()) : 1)};
  }
}

std::uint64_t parse_cache_bytes(const std::string& text) {
  std::uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{}) return 0;
  const std::string unit(rest, end);
  return value << (unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : 0);
}

}  // namespace phalanx
