#include "phalanx/measure/topology.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <fstream>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/measure/bandwidth.h"
#include "phalanx/measure/gpu_links.h"

namespace phalanx::measure {
namespace {

/// A root folder with the files of /sys and /proc that a test adds.
class FakeRoot {
 public:
  void file(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((folder_.path() / path).parent_path());
    std::ofstream(folder_.path() / path) << text << "\n";
  }
  void link(const std::string& path, const std::string& target) {
    std::filesystem::create_directories((folder_.path() / path).parent_path());
    std::filesystem::create_symlink(target, folder_.path() / path);
  }
  const std::filesystem::path& path() const { return folder_.path(); }

 private:
  TempDirectory folder_{"topology"};
};

/// Two sockets with two cores each, and two threads per core; CPU 7 is offline. Caches: 32K + 48K per core, 2M per
/// core, 32M per socket.
void fill_with_server(FakeRoot& root) {
  root.file("proc/cpuinfo", "processor\t: 0\nmodel name\t: Test CPU 9000\n");
  root.file("sys/devices/system/cpu/online", "0-6");
  for (int cpu = 0; cpu < 8; ++cpu) {
    const int package = cpu / 2 % 2, core = cpu % 2, other = cpu < 4 ? cpu + 4 : cpu - 4;
    const std::string folder = fmt::format("sys/devices/system/cpu/cpu{}/", cpu);
    root.file(folder + "topology/physical_package_id", std::to_string(package));
    root.file(folder + "topology/core_id", std::to_string(core));
    const std::string pair = fmt::format("{},{}", std::min(cpu, other), std::max(cpu, other));
    const std::string socket = package == 0 ? "0-1,4-5" : "2-3,6";
    const auto cache = [&](int index, const char* level, const char* type, const char* size, const std::string& cpus) {
      const std::string path = fmt::format("{}cache/index{}/", folder, index);
      root.file(path + "level", level);
      root.file(path + "type", type);
      root.file(path + "size", size);
      root.file(path + "shared_cpu_list", cpus);
    };
    cache(0, "1", "Data", "48K", pair);
    cache(1, "1", "Instruction", "32K", pair);
    cache(2, "2", "Unified", "2048K", pair);
    cache(3, "3", "Unified", "32M", socket);
  }
  root.file("sys/devices/system/cpu/cpufreq/x", "");  // not a CPU
  root.file("sys/devices/system/node/node0/cpulist", "0-1,4-5");
  root.file("sys/devices/system/node/node0/meminfo",
            "Node 0 MemTotal:       16777216 kB\nNode 0 MemFree:        8388608 kB");
  root.file("sys/devices/system/node/node0/distance", "10 21");
  root.file("sys/devices/system/node/node1/cpulist", "2-3,6");
  root.file("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       16777216 kB");
  root.file("sys/devices/system/node/node1/distance", "21 10");

  root.file("sys/class/net/lo/type", "772");
  root.file("sys/class/net/lo/operstate", "unknown");
  root.file("sys/class/net/lo/mtu", "65536");
  root.file("sys/class/net/eth0/type", "1");
  root.file("sys/class/net/eth0/operstate", "up");
  root.file("sys/class/net/eth0/speed", "25000");
  root.file("sys/class/net/eth0/mtu", "9000");
  root.file("sys/class/net/eth0/device/numa_node", "1");
  root.link("sys/class/net/eth0/device/driver", "../drivers/mlx5_core");
  root.file("sys/class/net/eth1/type", "1");
  root.file("sys/class/net/eth1/operstate", "down");
  root.file("sys/class/net/eth1/speed", "-1");
  root.file("sys/class/net/eth1/device/numa_node", "-1");
  root.file("sys/class/net/docker0/type", "1");
  root.file("sys/class/net/bonding_masters", "");
  root.file("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE");
  root.file("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)");
  root.file("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand");
}

TEST(Topology, ReadsAServerFromSysfs) {
  FakeRoot root;
  fill_with_server(root);
  const Topology machine = read_topology(root.path(), InterfaceAddresses{{"eth0", {"10.0.0.7", "fe80::1"}}});
  EXPECT_EQ(machine.cpu_model, "Test CPU 9000");
  EXPECT_EQ(machine.cpus.size(), 7U);
  EXPECT_EQ(machine.packages(), 2);
  EXPECT_EQ(machine.cores(), 4);
  EXPECT_EQ(machine.threads_per_core(), 2);
  EXPECT_EQ(machine.caches.size(), 4U + 4U + 4U + 2U);
  EXPECT_EQ(machine.cache_bytes(1, 6), 48U << 10);
  EXPECT_EQ(machine.cache_bytes(3, 6), 32U << 20);
  EXPECT_EQ(machine.cache_bytes(4, 0), 0U);
  ASSERT_EQ(machine.nodes.size(), 2U);
  EXPECT_THAT(machine.nodes[1].cpus, ElementsAre(2, 3, 6));
  EXPECT_THAT(machine.nodes[1].distances, ElementsAre(21, 10));
  EXPECT_EQ(machine.nodes[0].bytes, std::uint64_t{16} << 30);
  EXPECT_EQ(machine.nodes[0].free_bytes, std::uint64_t{8} << 30);

  ASSERT_EQ(machine.network.size(), 4U);
  const NetworkDevice& docker = machine.network[0];
  EXPECT_EQ(docker.kind, "virtual");
  const NetworkDevice& eth0 = machine.network[1];
  EXPECT_EQ(eth0.kind, "ethernet");
  EXPECT_EQ(eth0.megabits, 25000);
  EXPECT_EQ(eth0.mtu, 9000);
  EXPECT_EQ(eth0.driver, "mlx5_core");
  EXPECT_EQ(eth0.numa_node, 1);
  EXPECT_THAT(eth0.addresses, ElementsAre("10.0.0.7", "fe80::1"));
  EXPECT_EQ(machine.network[2].megabits, std::nullopt);
  EXPECT_EQ(machine.network[2].numa_node, std::nullopt);
  EXPECT_EQ(machine.network[3].kind, "loopback");
  ASSERT_EQ(machine.infiniband.size(), 1U);
  EXPECT_EQ(machine.infiniband[0].state, "ACTIVE");

  EXPECT_THAT(describe(machine),
              AllOf(HasSubstr("2 sockets, 4 cores, 2 hardware threads each: 7 CPUs"),
                    HasSubstr("L1d   48.0 KiB  x 4, 2 CPUs each"), HasSubstr("L3    32.0 MiB  x 1, 4 CPUs each"),
                    HasSubstr("distance  21  10"), HasSubstr("25 Gbit/s"), HasSubstr("400 Gb/sec (4X NDR)")));
}

TEST(Topology, WhatTheKernelDoesNotTellIsEmpty) {
  const FakeRoot empty;
  const Topology machine = read_topology(empty.path(), InterfaceAddresses{});
  EXPECT_EQ(machine.cpus.size(), 0U);
  EXPECT_EQ(machine.packages(), 0);
  EXPECT_THAT(describe(machine),
              AllOf(HasSubstr("CPU of unknown model"), HasSubstr("the kernel tells of none"), HasSubstr("no devices")));
}

TEST(Topology, ReadsThisMachine) {
  const Topology machine = read_topology();
  EXPECT_GE(machine.cpus.size(), 1U);
  ASSERT_GE(machine.network.size(), 1U);
}

// The matrix of NUMA nodes has a speed for each pair, even with one node. A request for memory that the machine does
// not have fails.
TEST(Bandwidth, NumaNodesAreMeasured) {
  Topology machine = read_topology();
  if (machine.nodes.empty()) GTEST_SKIP() << "the kernel tells of no NUMA nodes";
  NumaSpeeds speeds;
  try {
    speeds = measure_numa(machine, std::chrono::milliseconds(3));
  } catch (const Error& error) {
    ASSERT_THAT(error.what(), HasSubstr("Operation not permitted"));
    GTEST_SKIP() << error.what();
  }
  ASSERT_GE(speeds.cpu_nodes.size(), 1U);
  ASSERT_GE(speeds.memory_nodes.size(), 1U);
  ASSERT_EQ(speeds.bytes_per_second.size(), speeds.cpu_nodes.size());
  for (const auto& row : speeds.bytes_per_second) {
    ASSERT_EQ(row.size(), speeds.memory_nodes.size());
    for (const double speed : row) EXPECT_GT(speed, 1e7);
  }
  machine.nodes.push_back({.id = 1000, .bytes = 1 << 30});
  EXPECT_THAT(error_text([&] { measure_numa(machine, std::chrono::milliseconds(1)); }),
              HasSubstr("memory of NUMA node 1000 cannot be had"));
}

TEST(Bandwidth, EachLevelIsMeasured) {
  EXPECT_EQ(copy_buffer_bytes(48 << 10, 1), 12U << 10);
  EXPECT_EQ(copy_buffer_bytes(48 << 20, 2), 6U << 20);
  const Topology machine = read_topology();
  const auto levels = measure_memory(machine, std::chrono::milliseconds(3));
  ASSERT_GE(levels.size(), 1U);
  EXPECT_EQ(levels.back().name, "memory");
  for (const MemoryLevel& level : levels) {
    EXPECT_GT(level.one_cpu, 1e7) << level.name;
    EXPECT_GT(level.all_cpus, 1e7) << level.name;
  }
}

TEST(Bandwidth, LinksBetweenProcessesAreMeasuredAndNobodyIsLeft) {
  for (const LinkSpeed& speed : {measure_shared_memory(4 << 20), measure_loopback(4 << 20)}) {
    EXPECT_GT(speed.bytes_per_second, 1e6);
    EXPECT_GT(speed.latency_seconds, 0);
    EXPECT_LT(speed.latency_seconds, 1);
  }
  errno = 0;
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

constexpr const char* kTopology =
    "\t\033[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n\nNIC Legend:\n\n  NIC0: mlx5_0\n";
constexpr const char* kGpus =
    "0, NVIDIA H200, 00000000:05:00.0, 143771, 5, 16\n1, NVIDIA H200, 00000000:06:00.0, 143771, 5, 16\n";

TEST(GpuLinks, TheMatrixOfNvidiaSmiIsRead) {
  const LinkMatrix matrix = parse_link_matrix(kTopology);
  EXPECT_THAT(matrix.names, ElementsAre("GPU0", "GPU1", "NIC0"));
  ASSERT_EQ(matrix.cells.size(), 3U);
  EXPECT_THAT(matrix.cells[0], ElementsAre("X", "NV18", "PIX"));
  EXPECT_THAT(matrix.cells[2], ElementsAre("PIX", "SYS", "X"));
  EXPECT_EQ(matrix.remarks[1], "CPUs 32-63, NUMA node 1");
  EXPECT_THAT(matrix.nics, ElementsAre("NIC0: mlx5_0"));
  EXPECT_TRUE(parse_link_matrix("no table at all\n").names.empty());
  EXPECT_TRUE(parse_link_matrix("\tGPU0\tGPU1\nGPU0\t X \tSYS\n").names.empty());  // a row is missing
}

TEST(GpuLinks, TheProgramIsAskedAndItsFailuresAreTold) {
  FakeRoot root;
  root.file("gpus", kGpus);
  root.file("matrix", kTopology);
  const auto script = [&](const std::string& body) {
    const std::string path = (root.path() / "nvidia-smi").string();
    std::ofstream(path) << "#!/bin/sh\n" << body;
    chmod(path.c_str(), 0755);
    return path;
  };
  const GpuLinks found = read_gpu_links(
      script(fmt::format("if [ \"$1\" = topo ]; then cat {0}/matrix; else cat {0}/gpus; fi\n", root.path().string())));
  EXPECT_EQ(found.problem, "");
  ASSERT_EQ(found.gpus.size(), 2U);
  EXPECT_EQ(found.gpus[1].bytes, std::uint64_t{143771} << 20);
  EXPECT_EQ(found.gpus[1].pcie, "gen 5 x16");
  EXPECT_THAT(describe(found), AllOf(HasSubstr("GPU1   NVIDIA H200, 140 GiB, 00000000:06:00.0, PCIe gen 5 x16"),
                                     HasSubstr("NV18"), HasSubstr("NIC0: mlx5_0")));

  EXPECT_THAT(read_gpu_links("/nonexistent/nvidia-smi").problem, HasSubstr("/nonexistent/nvidia-smi is not installed"));
  EXPECT_THAT(read_gpu_links(script("exit 9\n")).problem, HasSubstr("nvidia-smi failed"));
  EXPECT_THAT(read_gpu_links(script("exec sleep 60\n"), std::chrono::milliseconds(50)).problem,
              HasSubstr("did not answer within 0.05 s"));
  EXPECT_THAT(describe(read_gpu_links("/nonexistent/nvidia-smi")), HasSubstr("none found: "));
}

}  // namespace
}  // namespace phalanx::measure
