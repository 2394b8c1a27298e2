// The devices of a plan: how many, how much memory each has, which of them share a machine. Knows no tensor.
//
// Presets are data (devices.cc says where each number is from). `this` is the machine that the planner runs on: its
// ranks are processes that share the memory which is free now, within what the limits of this process and its
// containers leave.
//
//   const Devices devices = parse_devices("8xH100", {.nodes = 2, .per_node = 4});
//   parse_devices("2x24GiB,2x80GiB", {});            // two small ones and two large ones, on one machine
//
// What is wrong is a UsageError: an unknown name (with the nearest), no count, nodes that do not make the devices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/base/memory_limits.h"

namespace phalanx::plan {

struct DevicePreset {
  std::string name;
  std::int64_t bytes = 0;  // that its driver tells
  std::string source;
};
const std::vector<DevicePreset>& device_presets();

struct DeviceGroup {
  std::int64_t count = 1;
  std::string name;        // a preset's; empty where only the size was given
  std::int64_t bytes = 0;  // of each
  std::string text() const;
};

struct Devices {
  std::vector<DeviceGroup> groups;  // in the order of the ranks
  std::int64_t per_node = 1;        // neighbours that share a machine
  bool is_host = false;             // processes of this machine, and its memory

  std::int64_t count() const noexcept;
  std::int64_t bytes_of(std::int64_t rank) const;
  std::int64_t smallest() const noexcept;
  std::int64_t largest() const noexcept;
  bool are_alike() const noexcept { return smallest() == largest(); }
  /// Those with the most memory alone, on machines of as many of them as one had.
  Devices largest_ones() const;
  std::string text() const;  // "16 x H100-80G (79.6 GiB) on 2 machines of 8"
};

struct NodeCounts {
  std::int64_t nodes = 0;     // 0: not given
  std::int64_t per_node = 0;  // 0: not given
};

/// Groups [COUNTx]NAME or [COUNTx]SIZE, joined by commas. Without a count: one for each place that `nodes` gives.
/// Without `nodes`: up to 8 devices are on one machine, more on machines of 8. `here` is what limits this machine's
/// ranks.
Devices parse_devices(const std::string& text, const NodeCounts& nodes,
                      const std::vector<MemoryLimit>& here = memory_limits());

}  // namespace phalanx::plan
