#include "phalanx/plan/devices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <limits>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/base/parse_text.h"
#include "phalanx/plan/bytes_text.h"

namespace phalanx::plan {
namespace {

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kMaxDevices = 1 << 16;
constexpr const char* kThisNode = "this";

/// Only letters and digits, in lower case: "RTX 4090" and "rtx-4090" are the same.
std::string plain_name(const std::string& name) {
  std::string plain;
  for (const unsigned char c : name) {
    if (std::isalnum(c) != 0) plain += static_cast<char>(std::tolower(c));
  }
  return plain;
}

/// The name without the memory: "A100".
std::string short_name(const DevicePreset& preset) { return preset.name.substr(0, preset.name.rfind('-')); }

const DevicePreset* find_preset(const std::string& name) {
  const std::string wanted = plain_name(name);
  for (const DevicePreset& preset : device_presets()) {
    if (wanted == plain_name(preset.name) || wanted == plain_name(short_name(preset))) return &preset;
  }
  return nullptr;
}

/// The bytes that one of `ranks` processes may use.
std::int64_t bytes_on_this_node(const std::vector<MemoryLimit>& limits, std::int64_t ranks) {
  std::uint64_t least = std::numeric_limits<std::int64_t>::max();
  for (const MemoryLimit& limit : limits) {
    const bool is_own = limit.shared_by == MemoryLimit::SharedBy::process;
    least = std::min(least, is_own ? limit.available() : limit.available() / static_cast<std::uint64_t>(ranks));
  }
  return static_cast<std::int64_t>(least);
}

/// The 8 of "8x" in "8xH100"; 0 without a count. `rest` is what follows.
std::int64_t take_count(const std::string& text, std::string& rest) {
  std::int64_t count = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, count);
  rest = text;
  if (error != std::errc() || stopped == end || (*stopped != 'x' && *stopped != 'X')) return 0;
  if (count < 1 || count > kMaxDevices) {
    throw UsageError(fmt::format("--devices '{}': expected 1 to {} devices", text, kMaxDevices));
  }
  rest = std::string(stopped + 1, end);
  return count;
}

/// "8xH100" for similar spellings: 8H100, 8*H100, H100x8, H100:8. Empty if it is none of these.
std::string meant_by(const std::string& what) {
  const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  const auto is_between = [](unsigned char c) {
    return std::string_view(" xX*:").find(static_cast<char>(c)) != std::string_view::npos;
  };
  const auto first = std::ranges::find_if_not(what, is_digit);
  std::string count(what.begin(), first), name(first, what.end());
  if (count.empty()) {
    const auto last = std::find_if_not(what.rbegin(), what.rend(), is_digit).base();
    count.assign(last, what.end());
    name.assign(what.begin(), last);
    while (!name.empty() && is_between(static_cast<unsigned char>(name.back()))) name.pop_back();
  } else {
    while (!name.empty() && is_between(static_cast<unsigned char>(name.front()))) name.erase(0, 1);
  }
  const DevicePreset* preset = count.empty() ? nullptr : find_preset(name);
  return preset == nullptr ? "" : fmt::format("{}x{}", count, short_name(*preset));
}

DeviceGroup device_of(const std::string& what, const std::string& all) {
  if (const DevicePreset* preset = find_preset(what)) return {.name = preset->name, .bytes = preset->bytes};
  if (const std::string meant = meant_by(what); !meant.empty()) {
    throw UsageError(fmt::format("--devices '{}': '{}' is not a device: did you mean {}?", all, what, meant));
  }
  if (!what.empty() && std::isdigit(static_cast<unsigned char>(what[0])) != 0) {
    const std::int64_t bytes = parse_size(fmt::format("--devices '{}'", all), what);
    if (bytes < kMiB)
      throw UsageError(
          fmt::format("--devices '{}': {} is too little: expected 1 MiB or more of a device's memory, or its name; "
                      "several are written 8xH100 or 2x24GiB",
                      all, what));
    return {.name = "", .bytes = bytes};
  }
  std::vector<std::string> names = {kThisNode}, known = names;
  for (const DevicePreset& preset : device_presets()) {
    names.push_back(preset.name);
    known.insert(known.end(), {short_name(preset), preset.name});
  }
  throw UsageError(fmt::format("--devices '{}': no device '{}' is known{}: expected one of {}, or a size such as 24GiB",
                               all, what, did_you_mean(what, known), fmt::join(names, ", ")));
}

void place_on_nodes(Devices& devices, const NodeCounts& nodes, const std::string& text) {
  const std::int64_t count = devices.count();
  std::int64_t per_node = nodes.per_node;
  if (per_node == 0 && nodes.nodes > 0) {
    if (count % nodes.nodes != 0) {
      throw UsageError(
          fmt::format("--devices '{}' are {}, which --nodes {} does not divide", text, count, nodes.nodes));
    }
    per_node = count / nodes.nodes;
  }
  if (per_node == 0) per_node = count <= kUsualPerNode ? count : kUsualPerNode;
  if (count % per_node != 0) {
    throw UsageError(
        fmt::format("--devices '{}' are {}, which do not make nodes of {}: give --per-node", text, count, per_node));
  }
  if (nodes.nodes > 0 && nodes.nodes * per_node != count) {
    throw UsageError(fmt::format("--nodes {} x --per-node {} = {} devices, but --devices '{}' are {}", nodes.nodes,
                                 per_node, nodes.nodes * per_node, text, count));
  }
  if (devices.is_host && per_node != count) {
    throw UsageError(fmt::format("--devices '{}' is one node: leave --nodes and --per-node out", text));
  }
  devices.per_node = per_node;
}

}  // namespace

const std::vector<DevicePreset>& device_presets() {
  // The total memory of a card as nvidia-smi reports it, in MiB; it is less than the vendor's round number.
  static const std::string kCards = "nvidia-smi, as collected in modal-client's documentation (pull request 2797)";
  static const std::string kSmi = "nvidia-smi";
  static const std::vector<DevicePreset> presets = {
      {"A100-80G", 81920 * kMiB, kCards},
      {"A100-40G", 40960 * kMiB, kCards},
      {"H100-80G", 81559 * kMiB, kCards},
      {"H200-141G", 143771 * kMiB, kSmi},
      {"B200-180G", 182630 * kMiB, "cudaGetDeviceProperties, 178.35 GiB (pytorch/ao, pull request 4002)"},
      {"L40S-48G", 46068 * kMiB, kCards},
      {"RTX4090-24G", 24564 * kMiB, kSmi},
  };
  return presets;
}

std::string DeviceGroup::text() const {
  return name.empty() ? fmt::format("{} x {}", count, bytes_text(bytes))
                      : fmt::format("{} x {} ({})", count, name, bytes_text(bytes));
}

std::int64_t Devices::count() const noexcept {
  std::int64_t sum = 0;
  for (const DeviceGroup& group : groups) sum += group.count;
  return sum;
}

std::int64_t Devices::bytes_of(std::int64_t rank) const {
  for (const DeviceGroup& group : groups) {
    if (rank < group.count) return group.bytes;
    rank -= group.count;
  }
  throw Error(fmt::format("there are {} devices, but rank {} was asked for", count(), count() + rank));
}

std::int64_t Devices::smallest() const noexcept {
  return std::ranges::min_element(groups, {}, &DeviceGroup::bytes)->bytes;
}
std::int64_t Devices::largest() const noexcept {
  return std::ranges::max_element(groups, {}, &DeviceGroup::bytes)->bytes;
}

Devices Devices::largest_ones() const {
  Devices largest{.groups = {}, .per_node = per_node, .is_host = is_host};
  for (const DeviceGroup& group : groups) {
    if (group.bytes == this->largest()) largest.groups.push_back(group);
  }
  largest.per_node = std::min(per_node, largest.count());
  if (largest.count() % largest.per_node != 0) largest.per_node = 1;
  return largest;
}

std::string Devices::text() const {
  std::vector<std::string> parts;
  for (const DeviceGroup& group : groups) parts.push_back(group.text());
  const std::string nodes = per_node == count() ? "" : fmt::format(" on {} nodes of {}", count() / per_node, per_node);
  return fmt::format("{}{}", fmt::join(parts, " + "), nodes);
}

Devices parse_devices(const std::string& text, const NodeCounts& nodes, const std::vector<MemoryLimit>& here) {
  Devices devices;
  for (const std::string& part : split_list(text)) {
    std::string what;
    std::int64_t count = take_count(part, what);
    if (count == 0) {
      const bool is_alone = text.find(',') == std::string::npos;
      count = is_alone ? std::max<std::int64_t>(nodes.nodes, 1) * std::max<std::int64_t>(nodes.per_node, 1) : 1;
    }
    if (what == kThisNode) {
      devices.is_host = true;
      devices.groups.push_back({.count = count, .name = "this node", .bytes = bytes_on_this_node(here, count)});
      continue;
    }
    devices.groups.push_back(device_of(what, text));
    devices.groups.back().count = count;
  }
  if (devices.is_host && devices.groups.size() > 1) {
    throw UsageError(fmt::format("--devices '{}': this node's memory does not mix with others'", text));
  }
  place_on_nodes(devices, nodes, text);
  return devices;
}

}  // namespace phalanx::plan
