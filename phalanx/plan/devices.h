// The devices of a plan: how many, how much memory each has, which of them share a node. It does not use torch.
//
// Presets are data (devices.cc gives the source of each number). `this` is the node that the planner runs on. Its ranks
// are processes that share the memory which is free now, within the limits of this process and its containers.
//
//   const Devices devices = parse_devices("8xH100", {.nodes = 2, .per_node = 4});
//   parse_devices("2x24GiB,2x80GiB", {});            // two small and two large devices, on one node
//
// Throws UsageError for an unknown name (with the nearest known one), a missing count, and nodes that do not match the
// number of devices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/base/memory_limits.h"

namespace phalanx::plan {

inline constexpr std::int64_t kUsualPerNode = 8;  // devices of a node, where nothing else is said

struct DevicePreset {
  std::string name;
  std::int64_t bytes = 0;  // as its driver reports
  std::string source;
};
const std::vector<DevicePreset>& device_presets();

struct DeviceGroup {
  std::int64_t count = 1;
  std::string name;        // a preset's; empty if only the size was given
  std::int64_t bytes = 0;  // of each
  std::string text() const;
};

struct Devices {
  std::vector<DeviceGroup> groups;  // in the order of the ranks
  std::int64_t per_node = 1;        // consecutive devices that share a node
  bool is_host = false;             // processes of this node, and its memory

  std::int64_t count() const noexcept;
  std::int64_t bytes_of(std::int64_t rank) const;
  std::int64_t smallest() const noexcept;
  std::int64_t largest() const noexcept;
  bool are_alike() const noexcept { return smallest() == largest(); }
  /// Only the devices with the most memory, on nodes with as many of them as one node had.
  Devices largest_ones() const;
  std::string text() const;  // "16 x H100-80G (79.6 GiB) on 2 nodes of 8"
};

struct NodeCounts {
  std::int64_t nodes = 0;     // 0: not given
  std::int64_t per_node = 0;  // 0: not given
};

/// `text`: groups [COUNTx]NAME or [COUNTx]SIZE, joined by commas. Without a count: one for each position that `nodes`
/// gives. Without `nodes`: up to 8 devices are on one node, more on nodes of 8. `here` limits the ranks of this node.
Devices parse_devices(const std::string& text, const NodeCounts& nodes,
                      const std::vector<MemoryLimit>& here = memory_limits());

}  // namespace phalanx::plan
