#include "phalanx/base/cpu.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

class CpuLimitsTest : public ::testing::Test {
 protected:
  void put(const std::string& path, const std::string& contents) {
    const std::filesystem::path full = root_.path() / path;
    std::filesystem::create_directories(full.parent_path());
    write_file(full, contents);
  }
  std::optional<double> quota() { return cpu_limits(root_.path()).quota; }

  TempDirectory root_{"cpu"};
};

TEST(Cpu, AffinityMaskCounts) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), cpu_limits().affinity);
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(cpu_limits().affinity, 1);
  EXPECT_EQ(usable_cores(), 1);
  sched_setaffinity(0, sizeof before, &before);
}

TEST_F(CpuLimitsTest, NoCgroupNoQuota) { EXPECT_EQ(quota(), std::nullopt); }

TEST_F(CpuLimitsTest, Version2TakesTheSmallestOfTheGroupAndItsParents) {
  put("proc/self/cgroup", "0::/jobs/job1/step\n");
  put("proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  put("sys/fs/cgroup/jobs/job1/step/cpu.max", "max 100000\n");
  EXPECT_EQ(quota(), std::nullopt);
  put("sys/fs/cgroup/jobs/job1/cpu.max", "150000 100000\n");
  EXPECT_EQ(quota(), 1.5);
  put("sys/fs/cgroup/jobs/cpu.max", "50000 100000\n");
  EXPECT_EQ(quota(), 0.5);
  EXPECT_EQ(cpu_limits(root_.path()).usable, 1);
}

TEST_F(CpuLimitsTest, ContainerThatSeesOnlyItsOwnGroup) {
  put("proc/self/cgroup", "0::/\n");
  put("proc/self/mountinfo", "29 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
  put("sys/fs/cgroup/cpu.max", "250000 100000\n");
  EXPECT_EQ(quota(), 2.5);
}

TEST_F(CpuLimitsTest, Version1) {
  put("proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n");
  put("proc/self/mountinfo", "33 32 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n");
  put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(), std::nullopt);
  put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "75000\n");
  EXPECT_EQ(quota(), 0.75);
}

TEST_F(CpuLimitsTest, LastCacheIsTheHighestLevels) {
  EXPECT_EQ(last_level_cache(root_.path()).bytes, 0U) << "the kernel does not say";
  const std::string caches = "sys/devices/system/cpu/cpu0/cache/";
  const auto put_cache = [&](int index, const std::string& level, const std::string& size, const std::string& cores) {
    const std::string folder = caches + "index" + std::to_string(index) + "/";
    put(folder + "level", level + "\n");
    put(folder + "size", size + "\n");
    put(folder + "shared_cpu_list", cores + "\n");
  };
  put_cache(0, "1", "48K", "0,64");
  put_cache(1, "1", "32K", "0,64");
  put_cache(2, "2", "2048K", "0,64");
  EXPECT_EQ(last_level_cache(root_.path()).bytes, 2048U << 10);
  EXPECT_EQ(last_level_cache(root_.path()).cores, 2);
  put_cache(3, "3", "32M", "0-3,64-67");
  EXPECT_EQ(last_level_cache(root_.path()).bytes, 32U << 20);
  EXPECT_EQ(last_level_cache(root_.path()).cores, 8);
}

TEST(Cpu, SizesOfCachesAreTheKernelsWords) {
  EXPECT_EQ(parse_cache_bytes("48K"), 48U << 10);
  EXPECT_EQ(parse_cache_bytes("32M"), 32U << 20);
  EXPECT_EQ(parse_cache_bytes("512"), 512U);
  EXPECT_EQ(parse_cache_bytes(""), 0U);
  EXPECT_EQ(parse_cache_bytes("large"), 0U);
}

TEST(ThreadsFromEnvironment, IsTheFirstNumberOrAnError) {
  const char* before = std::getenv("OMP_NUM_THREADS");
  const std::string kept = before != nullptr ? before : "";
  const auto threads = [](const char* text) {
    setenv("OMP_NUM_THREADS", text, 1);
    return threads_from_environment();
  };
  EXPECT_EQ(threads("3"), 3);
  EXPECT_EQ(threads("4,2"), 4);
  EXPECT_EQ(threads(""), std::nullopt);
  for (const char* text : {"abc", "0", "-2", "2x", "99999", "4,many", "1.5"}) {
    try {
      threads(text);
      ADD_FAILURE() << text;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::string("OMP_NUM_THREADS is '") + text + "'"));
    }
  }
  unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(threads_from_environment(), std::nullopt);
  if (before != nullptr) setenv("OMP_NUM_THREADS", kept.c_str(), 1);
}

}  // namespace
}  // namespace phalanx
