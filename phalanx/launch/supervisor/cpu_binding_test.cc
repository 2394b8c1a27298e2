#include "phalanx/launch/supervisor/cpu_binding.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>

#include "phalanx/base/cpu_list.h"
#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/supervisor/worker_logs.h"

namespace phalanx {
namespace {

// Two sockets with two NUMA nodes each. A NUMA node has four cores with two threads (numbers t and t + 16) and two
// caches.
class FakeMachine {
 public:
  FakeMachine() : root_("sysfs") {
    for (int node = 0; node < 4; ++node) {
      const int first = node * 4;
      write(fmt::format("sys/devices/system/node/node{}/cpulist", node),
            fmt::format("{}-{},{}-{}\n", first, first + 3, first + 16, first + 19));
      for (int core = first; core < first + 4; ++core)
        for (const int cpu : {core, core + 16}) {
          const std::string folder = fmt::format("sys/devices/system/cpu/cpu{}/", cpu);
          write(folder + "topology/physical_package_id", std::to_string(node / 2));
          write(folder + "topology/thread_siblings_list", fmt::format("{},{}", core, core + 16));
          const int pair = core / 2 * 2;
          cache(folder + "cache/index0/", 1, "Data", fmt::format("{},{}", core, core + 16));
          cache(folder + "cache/index1/", 1, "Instruction", "0-31");
          cache(folder + "cache/index3/", 3, "Unified",
                fmt::format("{}-{},{}-{}", pair, pair + 1, pair + 16, pair + 17));
        }
    }
    write("sys/devices/system/node/has_cpu", "0-3");
    for (int cpu = 0; cpu < 32; ++cpu) allowed_.push_back(cpu);
  }
  void add_gpu(const std::string& address, int node, const std::string& uuid) {
    write("sys/bus/pci/devices/" + address + "/vendor", "0x10de\n");
    write("sys/bus/pci/devices/" + address + "/class", "0x030200\n");
    write("sys/bus/pci/devices/" + address + "/numa_node", std::to_string(node));
    write("proc/driver/nvidia/gpus/" + address + "/information",
          fmt::format("Model: X\nGPU UUID: \t {}\nBus: 1\n", uuid));
  }
  std::vector<std::string> bind(NumaBinding mode, int ranks, const EnvironmentMap& environment = {}) const {
    std::vector<std::string> result;
    for (const auto& cpus : bind_ranks({.mode = mode, .root = root_.path(), .allowed = allowed_}, ranks, environment))
      result.push_back(cpu_list_text(cpus));
    return result;
  }
  void allow(std::vector<int> cpus) { allowed_ = std::move(cpus); }

 private:
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_.path() / path).parent_path());
    std::ofstream(root_.path() / path) << text;
  }
  void cache(const std::string& folder, int level, const std::string& type, const std::string& cpus) const {
    write(folder + "level", std::to_string(level));
    write(folder + "type", type);
    write(folder + "shared_cpu_list", cpus);
  }
  TempDirectory root_;
  std::vector<int> allowed_;
};

TEST(CpuBindingTest, WithoutGpusRanksShareTheNodesInOrder) {
  const FakeMachine machine;
  EXPECT_THAT(machine.bind(NumaBinding::node, 2), ElementsAre("0-3,16-19", "8-11,24-27"));
  EXPECT_THAT(machine.bind(NumaBinding::socket, 2), ElementsAre("0-7,16-23", "8-15,24-31"));
  EXPECT_THAT(machine.bind(NumaBinding::exclusive, 8),
              ElementsAre("0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23", "8-9,24-25", "10-11,26-27", "12-13,28-29",
                          "14-15,30-31"));
  EXPECT_THAT(machine.bind(NumaBinding::node, 1), ElementsAre("0-3,16-19"));
}

TEST(CpuBindingTest, RanksAreNearTheirGpus) {
  FakeMachine machine;
  machine.add_gpu("0000:c1:00.0", 3, "GPU-cccc");
  machine.add_gpu("0000:41:00.0", 1, "GPU-aaaa");
  machine.add_gpu("0000:81:00.0", 1, "GPU-bbbb");
  EXPECT_THAT(machine.bind(NumaBinding::node, 3), ElementsAre("4-7,20-23", "4-7,20-23", "12-15,28-31"));
  EXPECT_THAT(machine.bind(NumaBinding::socket, 1), ElementsAre("0-7,16-23"));
  EXPECT_THAT(machine.bind(NumaBinding::exclusive, 3), ElementsAre("4-5,20-21", "6-7,22-23", "12-15,28-31"));
  EXPECT_THAT(machine.bind(NumaBinding::core_complex, 3), ElementsAre("4-5,20-21", "6-7,22-23", "12-13,28-29"));
  EXPECT_THAT(machine.bind(NumaBinding::node, 2, {{"CUDA_VISIBLE_DEVICES", "2,0"}}),
              ElementsAre("12-15,28-31", "4-7,20-23"));
  EXPECT_THAT(machine.bind(NumaBinding::node, 1, {{"CUDA_VISIBLE_DEVICES", "GPU-cc"}}), ElementsAre("12-15,28-31"));
}

// The launcher uses one parser of the list everywhere: visible_gpus.h.
TEST(CpuBindingTest, TheListOfGpusIsReadAsCudaReadsIt) {
  FakeMachine machine;
  machine.add_gpu("0000:41:00.0", 1, "GPU-aaaa");
  machine.add_gpu("0000:c1:00.0", 3, "GPU-cccc");
  const std::string first = "0-3,16-19", near_0 = "4-7,20-23", near_1 = "12-15,28-31";
  const auto bound = [&](const std::string& list) {
    return machine.bind(NumaBinding::node, 2, {{"CUDA_VISIBLE_DEVICES", list}});
  };
  EXPECT_THAT(bound("1,0"), ElementsAre(near_1, near_0));
  EXPECT_THAT(bound("1,9,0"), ElementsAre(near_1, near_1)) << "9 ends the list";
  EXPECT_THAT(bound("1,-1,0"), ElementsAre(near_1, near_1));
  EXPECT_THAT(bound("GPU-cc, 0"), ElementsAre(near_1, near_0));
  EXPECT_THAT(bound("MIG-GPU-cccc/1/0,MIG-GPU-aaaa/2/0"), ElementsAre(near_1, near_0));
  for (const char* none : {"", "9", "x", "GPU-", "0,0", "MIG-5"})
    EXPECT_THAT(bound(none), ElementsAre(first, "8-11,24-27")) << "as without GPUs: " << none;
  FakeMachine single;
  single.add_gpu("0000:c1:00.0", 3, "GPU-cccc");
  EXPECT_THAT(single.bind(NumaBinding::node, 2, {{"CUDA_VISIBLE_DEVICES", "MIG-5,MIG-6"}}),
              ElementsAre(near_1, near_1));
}

TEST(CpuBindingTest, UnevenSharesGoToTheFirstRanksAndOnlyAllowedCpusAreGiven) {
  FakeMachine machine;
  for (const char* address : {"0000:01:00.0", "0000:02:00.0", "0000:03:00.0"}) machine.add_gpu(address, 0, "GPU-x");
  EXPECT_THAT(machine.bind(NumaBinding::exclusive, 3), ElementsAre("0-1,16-17", "2,18", "3,19"));
  machine.allow({1, 2, 3, 8});
  EXPECT_THAT(machine.bind(NumaBinding::exclusive, 3), ElementsAre("1", "2", "3"));
  machine.allow({1, 2, 8});
  EXPECT_THAT(error_text<UsageError>([&] { machine.bind(NumaBinding::exclusive, 3); }),
              HasSubstr("3 ranks share NUMA node 0, which has 2 cores that this process may use"));
  machine.allow({8, 9});
  EXPECT_THAT(error_text<UsageError>([&] { machine.bind(NumaBinding::node, 1); }),
              HasSubstr("may use none of that node's CPUs"));
}

TEST(CpuBindingTest, ListsMustFit) {
  const CpuBindingOptions options{.lists = {{0, 1}, {2}}, .allowed = std::vector<int>{0, 1, 2}};
  EXPECT_THAT(bind_ranks(options, 2, {}), ElementsAre(ElementsAre(0, 1), ElementsAre(2)));
  EXPECT_THAT(error_text<UsageError>([&] { bind_ranks(options, 3, {}); }),
              HasSubstr("lists the CPUs of 2 ranks: expected 3"));
  EXPECT_THAT(error_text<UsageError>([] {
                bind_ranks({.lists = {{0, 9}}, .allowed = std::vector<int>{0, 1}}, 1, {});
              }),
              HasSubstr("of the CPUs 0,9 this process may use 0; all that it may use: 0-1"));
  EXPECT_THAT(parse_cpu_list("x", "8,0-3,2"), ElementsAre(0, 1, 2, 3, 8));
  for (const char* bad : {"", "a", "3-1", "-1", "1-", "1,,x", "0-99999999"})
    EXPECT_THAT(error_text<UsageError>([&] { parse_cpu_list("--cpu-binding", bad); }),
                HasSubstr("expected CPU numbers"))
        << bad;
  EXPECT_THAT(error_text<UsageError>([] { parse_numa_binding("--numa-binding", "nodes"); }),
              HasSubstr("did you mean 'node'"));
}

TEST(CpuBindingTest, SharedCpusCountInParts) {
  EXPECT_EQ(cores_for_rank({{0, 1, 2, 3}, {0, 1, 2, 3}}, 1), 2);
  EXPECT_EQ(cores_for_rank({{0, 1, 2}, {3}}, 0), 3);
  EXPECT_EQ(cores_for_rank({{0}, {0}, {0}}, 2), 1);
}

TEST(StreamChoiceTest, TorchrunsTwoForms) {
  const auto all = StreamChoice::parse("-r", "3");
  EXPECT_EQ(all.of(0), 3);
  EXPECT_EQ(all.of(77), 3);
  const auto some = StreamChoice::parse("-r", "0:1,12:2");
  EXPECT_EQ(some.of(0), 1);
  EXPECT_EQ(some.of(12), 2);
  EXPECT_EQ(some.of(1), 0);
  EXPECT_TRUE(StreamChoice::parse("-r", "0").is_empty());
  EXPECT_TRUE(StreamChoice::parse("-r", "1:0").is_empty());
  for (const char* bad : {"", "4", "-1", "0:4", "0:", ":1", "0:1,0:2", "0-1:3"})
    EXPECT_THAT(error_text<UsageError>([&] { StreamChoice::parse("--tee", bad); }), HasSubstr("--tee is '")) << bad;
}

}  // namespace
}  // namespace phalanx
