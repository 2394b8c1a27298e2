#include "phalanx/plan/devices.h"

#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::plan {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

std::string devices_refusal(const std::string& text, const NodeCounts& nodes = {}) {
  return error_text<UsageError>([&] { parse_devices(text, nodes, {}); });
}

TEST(Devices, PresetsAreFoundByTheirNames) {
  for (const DevicePreset& preset : device_presets()) {
    EXPECT_EQ(parse_devices(preset.name, {}, {}).smallest(), preset.bytes);
    EXPECT_FALSE(preset.source.empty()) << preset.name;
  }
  for (const char* name : {"8xRTX4090", "8xrtx-4090", "8XRTX 4090-24G"}) {
    const Devices devices = parse_devices(name, {}, {});
    EXPECT_EQ(devices.count(), 8) << name;
    EXPECT_EQ(devices.groups[0].name, "RTX4090-24G") << name;
  }
  EXPECT_EQ(parse_devices("A100", {}, {}).groups[0].name, "A100-80G");
  EXPECT_EQ(parse_devices("a100-40g", {}, {}).smallest(), 40 * kGiB);
}

TEST(Devices, MayDiffer) {
  const Devices devices = parse_devices("2x24GiB,3x80G", {}, {});
  EXPECT_EQ(devices.count(), 5);
  EXPECT_EQ(devices.bytes_of(1), 24 * kGiB);
  EXPECT_EQ(devices.bytes_of(2), 80 * kGiB);
  EXPECT_EQ(devices.text(), "2 x 24.0 GiB + 3 x 80.0 GiB");
  EXPECT_FALSE(devices.are_alike());
  EXPECT_EQ(devices.largest_ones().text(), "3 x 80.0 GiB");
  EXPECT_THROW(devices.bytes_of(5), Error);
}

TEST(Devices, AreOnMachines) {
  EXPECT_EQ(parse_devices("8xH100", {}, {}).per_node, 8);
  EXPECT_EQ(parse_devices("3xH100", {}, {}).per_node, 3);
  EXPECT_EQ(parse_devices("16xH100", {}, {}).text(), "16 x H100-80G (79.6 GiB) on 2 nodes of 8");
  EXPECT_EQ(parse_devices("16xH100", {.nodes = 4}, {}).per_node, 4);
  EXPECT_EQ(parse_devices("H100", {.nodes = 2, .per_node = 4}, {}).count(), 8);
  EXPECT_THAT(devices_refusal("12xH100"), HasSubstr("are 12, which do not make nodes of 8: give --per-node"));
  EXPECT_THAT(devices_refusal("8xH100", {.nodes = 3}), HasSubstr("are 8, which --nodes 3 does not divide"));
  EXPECT_THAT(devices_refusal("8xH100", {.nodes = 2, .per_node = 8}),
              HasSubstr("--nodes 2 x --per-node 8 = 16 devices, but --devices '8xH100' are 8"));
}

TEST(Devices, ThisMachineSharesWhatIsFree) {
  const auto limit = [](MemoryLimit::SharedBy shared_by, std::uint64_t free) {
    return MemoryLimit{.name = "limit",
                       .counts = MemoryLimit::Counts::everything,
                       .shared_by = shared_by,
                       .bytes = free + 100,
                       .used = 100,
                       .domain = {}};
  };
  const auto node = limit(MemoryLimit::SharedBy::node, 12 * kGiB);
  const auto process = limit(MemoryLimit::SharedBy::process, 2 * kGiB);
  EXPECT_EQ(parse_devices("4xthis", {}, {node}).smallest(), 3 * kGiB);
  EXPECT_EQ(parse_devices("4xthis", {}, {node, process}).smallest(), 2 * kGiB);
  EXPECT_TRUE(parse_devices("this", {}, {node}).is_host);
  EXPECT_THAT(devices_refusal("2xthis,H100"), HasSubstr("this node's memory does not mix with others'"));
  EXPECT_THAT(devices_refusal("4xthis", {.nodes = 2}), HasSubstr("is one node: leave --nodes and --per-node out"));
}

TEST(Devices, WhatIsUnknownIsRefused) {
  EXPECT_THAT(devices_refusal("8xH10"),
              HasSubstr("no device 'H10' is known (did you mean 'H100'?): expected one of this, A100-80G,"));
  EXPECT_THAT(devices_refusal("8xL40S-24G"), HasSubstr("no device 'L40S-24G' is known (did you mean 'L40S-48G'?)"));
  EXPECT_THAT(devices_refusal("0xH100"), HasSubstr("expected 1 to 65536 devices"));
  EXPECT_THAT(devices_refusal("8x"), HasSubstr("no device '' is known"));
  EXPECT_THAT(devices_refusal("2x24Q"), HasSubstr("'24Q' is no size"));
  EXPECT_THAT(devices_refusal("2x24"), HasSubstr("24 is too little: expected 1 MiB or more"));
  EXPECT_THAT(devices_refusal("8"), HasSubstr("8 is too little"));
  EXPECT_THAT(devices_refusal("8"), HasSubstr("several are written 8xH100 or 2x24GiB"));
}

}  // namespace
}  // namespace phalanx::plan
