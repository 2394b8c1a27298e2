#include "phalanx/launch/supervisor/visible_gpus.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>

namespace phalanx {
namespace {

constexpr std::string_view kGpu = "GPU-", kMig = "MIG-";

int count_device_files(const std::filesystem::path& root) {
  constexpr std::string_view kName = "nvidia";
  int devices = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root / "dev", error)) {
    const std::string name = entry.path().filename().string();
    if (name.size() > kName.size() && name.starts_with(kName) &&
        std::all_of(name.begin() + kName.size(), name.end(), [](unsigned char c) { return c >= '0' && c <= '9'; }))
      ++devices;
  }
  return devices;
}

// The UUIDs of all GPUs that the driver reports, in no particular order.
std::vector<std::string> gpu_uuids(const std::filesystem::path& root) {
  std::vector<std::string> uuids;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root / "proc/driver/nvidia/gpus", error)) {
    std::ifstream file(entry.path() / "information");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    if (const std::size_t at = text.find(kGpu); at != std::string::npos)
      uuids.push_back(text.substr(at, text.find_first_of(" \n", at) - at));
  }
  return uuids;
}

std::string_view without_spaces(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// A unique name for the GPU of this entry, the same for every entry of that GPU; empty if the entry names no GPU.
std::string gpu_named(std::string_view entry, int devices, const std::vector<std::string>& uuids) {
  if (entry.starts_with(kGpu)) {
    if (uuids.empty()) return std::string(entry);
    const auto is_it = [&](const std::string& uuid) { return uuid.starts_with(entry); };
    if (std::count_if(uuids.begin(), uuids.end(), is_it) != 1) return "";
    return *std::find_if(uuids.begin(), uuids.end(), is_it);
  }
  int index = -1;
  const auto [end, error] = std::from_chars(entry.data(), entry.data() + entry.size(), index);
  const bool is_number = error == std::errc{} && end == entry.data() + entry.size();
  return is_number && index >= 0 && index < devices ? std::to_string(index) : "";
}

}  // namespace

std::vector<std::string> listed_gpus(std::string_view list, const std::filesystem::path& root) {
  const int devices = count_device_files(root);
  const auto uuids = gpu_uuids(root);
  const bool is_mig = without_spaces(list).starts_with(kMig);
  std::vector<std::string> entries;
  std::set<std::string> seen;
  for (bool more = true; more;) {
    const std::size_t comma = list.find(',');
    const std::string_view entry = without_spaces(list.substr(0, comma));
    const std::string gpu = is_mig && entry.starts_with(kMig)
                                ? std::string(entry)
                                : gpu_named(entry, devices > 0 ? devices : std::numeric_limits<int>::max(), uuids);
    if (gpu.empty()) break;
    if (!seen.insert(gpu).second) return {};
    entries.emplace_back(entry);
    more = comma != std::string_view::npos;
    if (more) list.remove_prefix(comma + 1);
  }
  return entries;
}

int count_visible_gpus(const EnvironmentMap& environment, const std::filesystem::path& root) {
  const int devices = count_device_files(root);
  const auto variable = environment.find("CUDA_VISIBLE_DEVICES");
  if (devices == 0 || variable == environment.end()) return devices;
  if (without_spaces(variable->second).starts_with(kMig)) return 1;
  return std::min<int>(static_cast<int>(listed_gpus(variable->second, root).size()), devices);
}

}  // namespace phalanx
