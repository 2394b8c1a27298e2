#include "phalanx/base/memory_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/under_sanitizer.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

/// A file tree that looks like that of a real machine.
class MemoryLimits : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = root_.path() / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  void write_limits(const std::string& data, const std::string& address_space) const {
    write("proc/self/limits",
          "Limit                     Soft Limit           Hard Limit           Units     \n"
          "Max cpu time              unlimited            unlimited            seconds   \n"
          "Max data size             " +
              data +
              "            unlimited            bytes     \n"
              "Max address space         " +
              address_space + "            unlimited            bytes     \n");
    write("proc/self/status", "Name:\tworker\nVmPeak:\t  999999 kB\nVmSize:\t  204800 kB\nVmData:\t   51200 kB\n");
  }
  std::map<std::string, MemoryLimit> limits() const {
    std::map<std::string, MemoryLimit> found;
    for (const MemoryLimit& limit : memory_limits(root_.path())) found.emplace(limit.name, limit);
    return found;
  }
  TempDirectory root_;
};

TEST_F(MemoryLimits, WithoutAnyFileNothingIsLimited) { EXPECT_TRUE(limits().empty()); }

TEST_F(MemoryLimits, ThoseOfTheProcessAreTheSoftOnes) {
  write_limits("209715200", "unlimited");
  auto found = limits();
  ASSERT_EQ(found.size(), 1U);
  const MemoryLimit& data = found.at("RLIMIT_DATA");
  EXPECT_EQ(data.bytes, 200 * kMiB);
  EXPECT_EQ(data.used, 50 * kMiB);
  EXPECT_EQ(data.available(), 150 * kMiB);
  EXPECT_EQ(data.counts, MemoryLimit::Counts::private_memory);
  EXPECT_EQ(data.shared_by, MemoryLimit::SharedBy::process);
  EXPECT_EQ(data.text(), "RLIMIT_DATA: 200 MiB, of which 50.0 MiB are in use");

  write_limits("unlimited", "419430400");
  found = limits();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found.at("RLIMIT_AS").available(), 200 * kMiB);
  EXPECT_EQ(found.at("RLIMIT_AS").counts, MemoryLimit::Counts::mappings);
}

TEST_F(MemoryLimits, ANumberTooLargeToMeanAnythingIsNone) {
  write_limits("9223372036854775808", "1152921504606846976");
  EXPECT_TRUE(limits().empty());
  write_limits("1152921504606846975", "18446744073709551615");
  EXPECT_EQ(limits().size(), 1U);
}

TEST_F(MemoryLimits, OfTheMachineIsWhatIsAvailable) {
  write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:  100 kB\nMemAvailable:    4194304 kB\n");
  const auto found = limits();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found.at("memory of this machine").available(), 4096 * kMiB);
  EXPECT_EQ(found.at("memory of this machine").shared_by, MemoryLimit::SharedBy::node);
}

TEST_F(MemoryLimits, GroupsOfVersion2AreLimitedByTheirParents) {
  write("proc/self/cgroup", "0::/slurm/job_7/step_0\n");
  write("proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  const std::string tree = "sys/fs/cgroup/slurm/";
  write(tree + "job_7/step_0/memory.max", "max\n");
  write(tree + "job_7/step_0/memory.current", "1048576\n");
  write(tree + "job_7/memory.max", "1073741824\n");
  write(tree + "job_7/memory.current", "314572800\n");
  write(tree + "job_7/memory.stat",
        "anon 1\ninactive_file 62914560\nactive_file 31457280\nslab_reclaimable 10485760\n"
        "slab_unreclaimable 7\n");
  write(tree + "memory.max", "2147483648\n");
  write(tree + "memory.current", "2000000000\n");
  const auto found = limits();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found.at("cgroup /slurm (v2)").available(), 2147483648 - 2000000000);
  const MemoryLimit& job = found.at("cgroup /slurm/job_7 (v2)");
  EXPECT_EQ(job.bytes, 1024 * kMiB);
  EXPECT_EQ(job.used, 200 * kMiB);  // without the cache
}

TEST_F(MemoryLimits, InAContainerTheMountIsTheGroup) {
  for (const std::string path : {"/", "/docker/abc", "/../elsewhere"}) {
    write("proc/self/cgroup", "0::" + path + "\n");
    write("proc/self/mountinfo", "30 24 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup ro\n");
    write("sys/fs/cgroup/memory.max", "536870912\n");
    write("sys/fs/cgroup/memory.current", "134217728\n");
    const auto found = limits();
    ASSERT_EQ(found.size(), 1U) << path;
    EXPECT_EQ(found.at("cgroup / (v2)").available(), 384 * kMiB) << path;
  }
}

TEST_F(MemoryLimits, Version1HasItsOwnNamesAndNumbers) {
  write("proc/self/cgroup", "12:pids:/x\n5:cpu,memory:/job\n0::/init\n");
  write("proc/self/mountinfo",
        "30 24 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "31 24 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
        "32 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");  // none
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_TRUE(limits().empty());
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "104857600\n");
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "52428800\n");
  write("sys/fs/cgroup/memory/job/memory.stat",
        "cache 5\ninactive_file 3\ntotal_inactive_file 9437184\ntotal_active_file 1048576\n");
  const auto found = limits();
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found.at("cgroup /job (v1)").bytes, 100 * kMiB);
  EXPECT_EQ(found.at("cgroup /job (v1)").used, 40 * kMiB);
}

TEST_F(MemoryLimits, MoreInUseThanAllowedLeavesNothing) {
  write_limits("1048576", "unlimited");
  EXPECT_EQ(limits().at("RLIMIT_DATA").available(), 0U);
}

TEST_F(MemoryLimits, TheDomainIsThatOfTheLimitNotOfTheProcess) {
  write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 4194304 kB\n");
  write("proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  for (const std::string group : {"job", "job/task_0", "job/task_1", "other"}) {
    write("sys/fs/cgroup/" + group + "/memory.max", group.starts_with("job/") ? "max\n" : "1073741824\n");
  }
  const auto seen_from = [&](const std::string& group) {
    write("proc/self/cgroup", "0::" + group + "\n");
    return limits();
  };
  EXPECT_EQ(seen_from("/job/task_0").at("memory of this machine").domain, "");  // its identity is unknown
  write("proc/sys/kernel/random/boot_id", "abc-1\n");
  write_limits("209715200", "unlimited");
  const auto first = seen_from("/job/task_0"), second = seen_from("/job/task_1"), other = seen_from("/other");
  EXPECT_NE(first.at("cgroup /job (v2)").domain, "");
  EXPECT_EQ(first.at("cgroup /job (v2)").domain, second.at("cgroup /job (v2)").domain);
  EXPECT_NE(first.at("cgroup /job (v2)").domain, other.at("cgroup /other (v2)").domain);
  EXPECT_EQ(first.at("memory of this machine").domain, other.at("memory of this machine").domain);
  EXPECT_NE(first.at("memory of this machine").domain, first.at("cgroup /job (v2)").domain);
  EXPECT_EQ(first.at("RLIMIT_DATA").domain, "");
  // Containers see their group as "/" at the same place, whichever group it is.
  write("proc/self/mountinfo", "30 24 0:26 / /container rw - cgroup2 cgroup2 rw\n");
  for (const std::string group : {"job", "other"}) {
    std::filesystem::remove(root_.path() / "container");
    std::filesystem::create_directory_symlink(root_.path() / "sys/fs/cgroup" / group, root_.path() / "container");
    const std::string domain = seen_from("/").at("cgroup / (v2)").domain;
    EXPECT_EQ(domain == first.at("cgroup /job (v2)").domain, group == "job");
    EXPECT_EQ(domain == other.at("cgroup /other (v2)").domain, group == "other");
  }
}

std::uint64_t available_data() {
  for (const MemoryLimit& limit : memory_limits()) {
    if (limit.name == "RLIMIT_DATA") return limit.available();
  }
  return 0;
}

bool can_map(std::uint64_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
}

// Run in a child, since a limit cannot be removed again.
[[noreturn]] void try_data_limit() {
  const auto fail = [](const char* why) {
    std::fputs(why, stderr);
    std::_Exit(1);
  };
  if (available_data() != 0) fail("there is a limit already");
  const std::uint64_t limit = std::uint64_t{4} << 30;
  const rlimit wanted{limit, limit};
  if (setrlimit(RLIMIT_DATA, &wanted) != 0) fail("setrlimit");
  const std::uint64_t before = available_data();
  if (before == 0 || before >= limit) fail("what is in use does not count");
  if (!can_map(1024 * kMiB)) fail("what is available cannot be had");
  const std::uint64_t after = available_data();
  if (before - after < 1000 * kMiB || before - after > 1048 * kMiB) fail("what has been taken does not count");
  if (can_map(after + 16 * kMiB)) fail("more can be had than is available");
  if (!can_map(after - 16 * kMiB)) fail("less can be had than is available");
  std::_Exit(0);
}

// The limits that the files of a real machine report are the limits that its kernel enforces.
TEST_F(MemoryLimits, OfARealProcessAreThoseItMeets) {
  if (kUnderSanitizer) GTEST_SKIP() << kWhyNoMemoryLimit;
  EXPECT_EXIT(try_data_limit(), ::testing::ExitedWithCode(0), "");
  std::uint64_t node = 0;
  for (const MemoryLimit& limit : memory_limits()) {
    if (limit.name == "memory of this machine") node = limit.available();
  }
  EXPECT_GT(node, 0U);
  EXPECT_FALSE(node_identity().empty());
}

}  // namespace
}  // namespace phalanx
