#include "phalanx/base/memory_limits.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <sstream>
#include <string_view>

#include "phalanx/base/file.h"
#include "phalanx/base/human.h"

namespace phalanx {
namespace {

namespace stdfs = std::filesystem;

constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;  // a number of this size means no limit (cgroup v1, ulimit)

std::string contents_or_nothing(const stdfs::path& path) {
  try {
    return read_file(path);
  } catch (const FileError&) {  // missing or not readable: then no limit is known
    return {};
  }
}

// The number after `key` at the beginning of a line; nullopt for "unlimited" and "max".
std::optional<std::uint64_t> number_behind(std::string_view text, std::string_view key) {
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    if (!line.starts_with(key)) continue;
    line.remove_prefix(key.size());
    line.remove_prefix(std::min(line.find_first_not_of(": \t"), line.size()));
    std::uint64_t value = 0;
    const auto [stop, error] = std::from_chars(line.data(), line.data() + line.size(), value);
    if (error == std::errc{} && stop != line.data()) return value;
    return std::nullopt;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> number_in(const stdfs::path& file) { return number_behind(contents_or_nothing(file), ""); }

void add_process_limits(const stdfs::path& root, std::vector<MemoryLimit>& found) {
  const std::string limits = contents_or_nothing(root / "proc/self/limits");
  const std::string status = contents_or_nothing(root / "proc/self/status");  // in kB
  const auto in_use = [&](std::string_view key) { return number_behind(status, key).value_or(0) * 1024; };
  if (const auto bytes = number_behind(limits, "Max data size"); bytes && *bytes < kNoLimit) {
    found.push_back({"RLIMIT_DATA",
                     MemoryLimit::Counts::private_memory,
                     MemoryLimit::SharedBy::process,
                     *bytes,
                     in_use("VmData"),
                     {}});
  }
  if (const auto bytes = number_behind(limits, "Max address space"); bytes && *bytes < kNoLimit) {
    found.push_back(
        {"RLIMIT_AS", MemoryLimit::Counts::mappings, MemoryLimit::SharedBy::process, *bytes, in_use("VmSize"), {}});
  }
}

struct CgroupNames {
  const char *version, *limit, *usage;
  std::array<const char*, 3> reclaimed;  // keys of memory.stat for the memory that the kernel reclaims before it kills
};
constexpr CgroupNames kV1 = {
    "v1", "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file", nullptr}};
constexpr CgroupNames kV2 = {
    "v2", "memory.max", "memory.current", {"inactive_file", "active_file", "slab_reclaimable"}};

struct Cgroup {
  std::string path;  // as in /proc/self/cgroup
  const CgroupNames* names;
};

// Lines are "5:cpu,memory:/path" (v1) and "0::/path" (v2). If both exist and v1 names the memory controller, v1 has it.
std::optional<Cgroup> own_cgroup(const stdfs::path& root) {
  std::istringstream lines(contents_or_nothing(root / "proc/self/cgroup"));
  std::optional<Cgroup> unified;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers.find(",memory,") != std::string::npos) return Cgroup{line.substr(second + 1), &kV1};
    if (controllers == ",,") unified = Cgroup{line.substr(second + 1), &kV2};
  }
  return unified;
}

// Where the group's files are: a container sees a part of the tree only, whose root mountinfo names. Lines:
//   id parent major:minor ROOT MOUNT_POINT options [tags] - TYPE source SUPER_OPTIONS
struct CgroupFolder {
  stdfs::path mount, group;  // `group` is `mount` or below it
};
std::optional<CgroupFolder> folder_of(const Cgroup& cgroup, const stdfs::path& root) {
  std::istringstream lines(contents_or_nothing(root / "proc/self/mountinfo"));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line.substr(0, dash)), after(line.substr(dash + 3));
    std::string skip, tree, mount_point, type, source, options;
    before >> skip >> skip >> skip >> tree >> mount_point;
    after >> type >> source >> options;
    const bool is_v1 = cgroup.names == &kV1;
    if (type != (is_v1 ? "cgroup" : "cgroup2")) continue;
    if (is_v1 && ("," + options + ",").find(",memory,") == std::string::npos) continue;
    CgroupFolder folder;
    folder.mount = folder.group = root / stdfs::path(mount_point).relative_path();
    // In a container the path may be outside of the mounted tree. Then the mount is the group itself.
    const stdfs::path inside = stdfs::path(cgroup.path).lexically_relative(tree);
    if (!inside.empty() && *inside.begin() != ".." && inside != ".") folder.group /= inside;
    return folder;
  }
  return std::nullopt;
}

// A container may see its group as "/", and each task may see its own leaf below the group that limits them all. So
// paths do not identify groups, but the kernel has one inode for each group.
std::string domain_of(const stdfs::path& group, const std::string& node) {
  struct stat status {};
  if (node.empty() || ::stat(group.c_str(), &status) != 0) return {};
  return fmt::format("cgroup {} {}:{}", node, status.st_dev, status.st_ino);
}

std::uint64_t reclaimable(const stdfs::path& group, const CgroupNames& names) {
  const std::string numbers = contents_or_nothing(group / "memory.stat");
  std::uint64_t bytes = 0;
  for (const char* key : names.reclaimed) {
    if (key != nullptr) bytes += number_behind(numbers, fmt::format("{} ", key)).value_or(0);
  }
  return bytes;
}

void add_cgroup_limits(const stdfs::path& root, std::vector<MemoryLimit>& found) {
  const auto cgroup = own_cgroup(root);
  if (!cgroup) return;
  const auto folder = folder_of(*cgroup, root);
  if (!folder) return;
  const std::string node = node_identity(root);
  for (stdfs::path at = folder->group;; at = at.parent_path()) {
    const auto bytes = number_in(at / cgroup->names->limit);
    if (bytes && *bytes < kNoLimit) {
      const std::uint64_t usage = number_in(at / cgroup->names->usage).value_or(0);
      const std::uint64_t cache = reclaimable(at, *cgroup->names);
      const std::string name = "/" + at.lexically_relative(folder->mount).string();
      found.push_back({fmt::format("cgroup {} ({})", name == "/." ? "/" : name, cgroup->names->version),
                       MemoryLimit::Counts::everything, MemoryLimit::SharedBy::node, *bytes,
                       usage > cache ? usage - cache : 0, domain_of(at, node)});
    }
    if (at == folder->mount || !at.has_relative_path()) break;
  }
}

void add_node_limit(const stdfs::path& root, std::vector<MemoryLimit>& found) {
  const std::string info = contents_or_nothing(root / "proc/meminfo");  // in kB
  const auto total = number_behind(info, "MemTotal"), available = number_behind(info, "MemAvailable");
  if (!total || !available) return;
  const std::string node = node_identity(root);
  found.push_back({"memory of this machine", MemoryLimit::Counts::everything, MemoryLimit::SharedBy::node,
                   *total * 1024, (*total - std::min(*total, *available)) * 1024,
                   node.empty() ? "" : "machine " + node});
}

}  // namespace

std::string MemoryLimit::text() const {
  return fmt::format("{}: {}, of which {} are in use", name, human_bytes(bytes), human_bytes(used));
}

std::vector<MemoryLimit> memory_limits(const stdfs::path& root) {
  std::vector<MemoryLimit> found;
  add_process_limits(root, found);
  add_cgroup_limits(root, found);
  add_node_limit(root, found);
  return found;
}

std::string node_identity(const stdfs::path& root) {
  const std::string boot = contents_or_nothing(root / "proc/sys/kernel/random/boot_id");
  return boot.substr(0, boot.find('\n'));
}

}  // namespace phalanx
