#include "phalanx/launch/supervisor/environment_preparation.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/supervisor/worker_report.h"

namespace phalanx {
namespace {

TEST(EnvironmentPreparationTest, SharesTheCoresAndSleepsWhenIdle) {
  EnvironmentMap environment;
  prepare_environment(environment, 2, 8);
  EXPECT_EQ(environment.at("OMP_NUM_THREADS"), "4");
  EXPECT_EQ(environment.at("OMP_WAIT_POLICY"), "passive");
  EXPECT_TRUE(environment.contains("GOMP_SPINCOUNT"));
  EnvironmentMap crowded;
  prepare_environment(crowded, 8, 2);
  EXPECT_EQ(crowded.at("OMP_NUM_THREADS"), "1");
  EXPECT_FALSE(crowded.contains("OMP_WAIT_POLICY"));
}

TEST(EnvironmentPreparationTest, LeavesTheUsersChoicesAlone) {
  EnvironmentMap environment{
      {"OMP_NUM_THREADS", "3"}, {"OMP_WAIT_POLICY", "active"}, {"GLIBC_TUNABLES", "glibc.malloc.tcache_count=1"}};
  prepare_environment(environment, 2, 8);
  EXPECT_EQ(environment.at("OMP_NUM_THREADS"), "3");
  EXPECT_EQ(environment.at("OMP_WAIT_POLICY"), "active");
  EXPECT_FALSE(environment.contains("GOMP_SPINCOUNT"));
  EXPECT_THAT(environment.at("GLIBC_TUNABLES"), StartsWith("glibc.malloc.tcache_count=1"));
  const std::string once = environment.at("GLIBC_TUNABLES");
  prepare_environment(environment, 2, 8);
  EXPECT_EQ(environment.at("GLIBC_TUNABLES"), once);
  EnvironmentMap chosen{{"GLIBC_TUNABLES", "glibc.malloc.hugetlb=0"}};
  prepare_environment(chosen, 1, 1);
  EXPECT_THAT(chosen.at("GLIBC_TUNABLES"), StartsWith("glibc.malloc.hugetlb=0:glibc.malloc.mmap_threshold="));
  EnvironmentMap trims{{"GLIBC_TUNABLES", "glibc.malloc.hugetlb=0:glibc.malloc.trim_threshold=1"}};
  prepare_environment(trims, 1, 1);
  EXPECT_EQ(trims.at("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=0:glibc.malloc.trim_threshold=1");
}

TEST(WorkerReportTest, TravelsFromWorkerToLauncher) {
  TempDirectory folder("report");
  EXPECT_FALSE(report_error_to_launcher(Error("nobody listens")));
  EXPECT_FALSE(read_worker_report(folder.path().string()).has_value());
  setenv("PHALANX_REPORT_DIR", folder.path().c_str(), 1);
  setenv("RANK", "5", 1);
  EXPECT_TRUE(report_error_to_launcher(DataError("line 1\n\"quoted\" \xff")));
  announce_graceful_stop(std::chrono::seconds(40));
  unsetenv("PHALANX_REPORT_DIR");
  unsetenv("RANK");
  const auto report = read_worker_report(folder.path().string());
  ASSERT_TRUE(report.has_value());
  EXPECT_EQ(report->rank, 5);
  EXPECT_EQ(report->kind, "DataError");
  EXPECT_THAT(report->message, StartsWith("line 1\n\"quoted\" "));
  EXPECT_EQ(read_graceful_stop(folder.path().string()), std::chrono::seconds(40));
}

}  // namespace
}  // namespace phalanx
