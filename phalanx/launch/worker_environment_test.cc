#include "phalanx/launch/worker_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/launch/environment_preparation.h"
#include "phalanx/launch/worker_report.h"

namespace phalanx {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Variables = std::map<std::string, std::string>;
using Rendezvous = WorkerEnvironment::Rendezvous;

WorkerEnvironment read_from(const Variables& variables) {
  return read_worker_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

std::string environment_error(const Variables& variables) {
  try {
    read_from(variables);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(WorkerEnvironmentTest, NothingSetIsASingleProcess) {
  for (const Variables& variables : {Variables{}, Variables{{"RANK", ""}, {"MASTER_ADDR", "node7"}}}) {
    const auto environment = read_from(variables);
    EXPECT_EQ(environment.rendezvous, Rendezvous::none);
    EXPECT_EQ(environment.rank, 0);
    EXPECT_EQ(environment.world_size, 1);
  }
}

TEST(WorkerEnvironmentTest, ReadsTheLaunchersVariables) {
  const auto environment = read_from({{"RANK", "3"},
                                      {"WORLD_SIZE", "4"},
                                      {"LOCAL_RANK", "1"},
                                      {"LOCAL_WORLD_SIZE", "2"},
                                      {"PHALANX_STORE", "127.0.0.1:4000"}});
  EXPECT_EQ(environment.rendezvous, Rendezvous::launcher);
  EXPECT_EQ(environment.rank, 3);
  EXPECT_EQ(environment.world_size, 4);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 2);
  EXPECT_EQ(environment.store.text(), "127.0.0.1:4000");
}

TEST(WorkerEnvironmentTest, ReadsTorchrunsVariables) {
  Variables variables{{"RANK", "1"},
                      {"WORLD_SIZE", "2"},
                      {"LOCAL_RANK", "1"},
                      {"LOCAL_WORLD_SIZE", "2"},
                      {"MASTER_ADDR", "node7"},
                      {"MASTER_PORT", "29500"}};
  EXPECT_EQ(read_from(variables).rendezvous, Rendezvous::static_master);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_EQ(read_from(variables).rendezvous, Rendezvous::static_master);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RUN_ID"] = "job";
  variables["TORCHELASTIC_RESTART_COUNT"] = "2";
  const auto environment = read_from(variables);
  EXPECT_EQ(environment.rendezvous, Rendezvous::agent_store);
  EXPECT_EQ(environment.master.text(), "node7:29500");
  EXPECT_EQ(environment.run_id, "job");
  EXPECT_EQ(environment.restart_count, 2);
}

TEST(WorkerEnvironmentTest, LocalRanksDefaultToOneMachine) {
  const auto environment = read_from({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 2);
}

TEST(WorkerEnvironmentTest, NamesEverythingThatIsWrongAtOnce) {
  EXPECT_THAT(environment_error({{"RANK", "1"}}), AllOf(HasSubstr("not set: WORLD_SIZE"), HasSubstr("phalanx launch")));
  EXPECT_THAT(environment_error({{"WORLD_SIZE", "2"}}), AllOf(HasSubstr("RANK, MASTER_ADDR, MASTER_PORT")));
  EXPECT_THAT(environment_error({{"RANK", "one"}, {"WORLD_SIZE", "0"}, {"MASTER_PORT", "70000"}, {"LOCAL_RANK", "0"}}),
              AllOf(HasSubstr("RANK is 'one'"), HasSubstr("WORLD_SIZE is '0'"), HasSubstr("LOCAL_WORLD_SIZE is not")));
  const Variables good{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  EXPECT_EQ(environment_error(good), "no error");
  for (const auto& [name, value, expected] :
       std::vector<std::array<std::string, 3>>{{"RANK", "2", "RANK is 2 and WORLD_SIZE 2"},
                                               {"RANK", "-1", "RANK is '-1'"},
                                               {"RANK", "1x", "RANK is '1x'"},
                                               {"MASTER_PORT", "0", "MASTER_PORT is '0'"},
                                               {"PHALANX_STORE", "nowhere", "PHALANX_STORE is 'nowhere'"}}) {
    auto variables = good;
    variables[name] = value;
    EXPECT_THAT(environment_error(variables), HasSubstr(expected));
  }
}

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
  EXPECT_THAT(environment.at("GLIBC_TUNABLES"), testing::StartsWith("glibc.malloc.tcache_count=1"));
  const std::string once = environment.at("GLIBC_TUNABLES");
  prepare_environment(environment, 2, 8);
  EXPECT_EQ(environment.at("GLIBC_TUNABLES"), once);
  EnvironmentMap chosen{{"GLIBC_TUNABLES", "glibc.malloc.hugetlb=0"}};
  prepare_environment(chosen, 1, 1);
  EXPECT_EQ(chosen.at("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=0");
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
  EXPECT_THAT(report->message, testing::StartsWith("line 1\n\"quoted\" "));
  EXPECT_EQ(read_graceful_stop(folder.path().string()), std::chrono::seconds(40));
}

}  // namespace
}  // namespace phalanx
