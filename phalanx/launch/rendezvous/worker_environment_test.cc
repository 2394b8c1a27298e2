#include "phalanx/launch/rendezvous/worker_environment.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/rendezvous/job_identity.h"

namespace phalanx {
namespace {

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
  return error_text<ConfigError>([&] { read_from(variables); });
}

TEST(WorkerEnvironmentTest, NothingSetIsASingleProcess) {
  for (const Variables& variables : {Variables{}, Variables{{"RANK", ""}, {"MASTER_ADDR", "node7"}}}) {
    const auto environment = read_from(variables);
    EXPECT_EQ(environment.rendezvous, Rendezvous::none);
    EXPECT_EQ(environment.rank, 0);
    EXPECT_EQ(environment.world_size, 1);
    EXPECT_EQ(environment.local_world_size, 1);
    EXPECT_EQ(environment.launcher, "");
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

TEST(WorkerEnvironmentTest, LocalRanksNeedNotBeTold) {
  const auto environment = read_from({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(environment.local_rank, -1);
  EXPECT_EQ(environment.local_world_size, -1);
  EXPECT_FALSE(environment.on_one_node());
  EXPECT_EQ(environment.launcher, "the variables RANK and WORLD_SIZE");
}

const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "2"},       {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                         {"PMIX_NAMESPACE", "1060110337"},    {"PMIX_RANK", "2"}};

// The variables that a real Slurm 22.05 sets for the third of four tasks on two nodes.
const Variables kSlurm{{"SLURM_PROCID", "2"},
                       {"SLURM_LOCALID", "0"},
                       {"SLURM_NODEID", "1"},
                       {"SLURM_JOB_ID", "7"},
                       {"SLURM_STEP_ID", "3"},
                       {"SLURM_STEP_NUM_TASKS", "4"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                       {"SLURM_STEP_NODELIST", "n[1-2]"},
                       {"SLURM_JOB_NODELIST", "n[0-2]"},
                       {"SLURM_CLUSTER_NAME", "the/cluster"},
                       {"SLURM_SUBMIT_DIR", "/data/me/run"},
                       {"SLURM_NTASKS", "4"}};

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

TEST(WorkerEnvironmentTest, ReadsOpenMpi) {
  const auto environment = read_from(kOpenMpi);
  EXPECT_EQ(environment.rendezvous, Rendezvous::shared_file);
  EXPECT_EQ(environment.rank, 2);
  EXPECT_EQ(environment.world_size, 4);
  EXPECT_EQ(environment.local_rank, 2);
  EXPECT_TRUE(environment.on_one_node());
  EXPECT_EQ(environment.launcher, "Open MPI (job 1060110337)");
  EXPECT_EQ(environment.file_folder, "");  // this user's private folder, under /tmp
  EXPECT_EQ(environment.file_name, ".phalanx-openmpi-1060110337");
  const auto over_nodes =
      read_from(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}));
  EXPECT_EQ(over_nodes.local_world_size, 2);
  EXPECT_EQ(over_nodes.file_folder, ".");
  EXPECT_EQ(read_from(with(kOpenMpi, {{"PHALANX_RENDEZVOUS_DIR", "/scratch"}})).file_folder, "/scratch");
}

TEST(WorkerEnvironmentTest, ReadsSlurm) {
  const auto environment = read_from(kSlurm);
  EXPECT_EQ(environment.rendezvous, Rendezvous::shared_file);
  EXPECT_EQ(environment.rank, 2);
  EXPECT_EQ(environment.world_size, 4);
  EXPECT_EQ(environment.local_rank, 0);
  EXPECT_EQ(environment.local_world_size, 2);
  EXPECT_EQ(environment.launcher, "Slurm (job 7, step 3)");
  EXPECT_EQ(environment.file_folder, "/data/me/run");
  EXPECT_EQ(environment.file_name, ".phalanx-slurm-the_cluster-7.3.0");
  EXPECT_EQ(read_from(with(kSlurm, {{"SLURM_RESTART_COUNT", "1"}})).file_name, ".phalanx-slurm-the_cluster-7.3.1");
  const auto on_one =
      read_from(with(kSlurm, {{"SLURM_NODEID", "0"}, {"SLURM_LOCALID", "2"}, {"SLURM_STEP_TASKS_PER_NODE", "4"}}));
  EXPECT_TRUE(on_one.on_one_node());
  EXPECT_EQ(on_one.file_folder, "");
}

TEST(WorkerEnvironmentTest, TheBatchScriptOfSlurmIsNoRank) {
  auto variables = kSlurm;
  for (const char* name : {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"}) variables.erase(name);
  EXPECT_EQ(read_from(variables).rendezvous, Rendezvous::none);
  EXPECT_EQ(read_from(variables).launcher, "");
  EXPECT_EQ(read_from(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "1"},
                                    {"SLURM_STEP_TASKS_PER_NODE", "1"},
                                    {"SLURM_PROCID", "0"},
                                    {"SLURM_NODEID", "0"}}))
                .rendezvous,
            Rendezvous::none);
}

TEST(WorkerEnvironmentTest, ReadsPmi) {
  const Variables pmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
  const auto environment = read_from(pmi);
  EXPECT_EQ(environment.rendezvous, Rendezvous::shared_file);
  EXPECT_EQ(environment.rank, 1);
  EXPECT_TRUE(environment.on_one_node());
  EXPECT_THAT(environment.file_name, StartsWith(".phalanx-pmi-"));
  // The nodes have no common information, so the ranks cannot find each other by themselves.
  const auto over_nodes = with(pmi, {{"MPI_LOCALNRANKS", "2"}});
  EXPECT_THAT(environment_error(over_nodes), AllOf(HasSubstr("PMI gives the job no name"), HasSubstr("MASTER_ADDR")));
  EXPECT_EQ(read_from(with(over_nodes, {{"PALS_APID", "a-b"}})).file_name, ".phalanx-pmi-a-b");
  EXPECT_EQ(read_from(with(over_nodes, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "5"}})).rendezvous,
            Rendezvous::static_master);
  // srun with a PMI plugin sets both. A launcher of MPICH inside an allocation sets other values than Slurm.
  EXPECT_EQ(read_from(with(kSlurm, {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}})).launcher, "Slurm (job 7, step 3)");
  EXPECT_EQ(read_from(with(kSlurm, pmi)).launcher, "PMI");
}

TEST(WorkerEnvironmentTest, TheInnermostLauncherCounts) {
  const Variables launched{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"PHALANX_STORE", "127.0.0.1:4000"}};
  EXPECT_EQ(read_from(with(with(kSlurm, kOpenMpi), launched)).launcher, "phalanx launch");
  EXPECT_EQ(read_from(with(kSlurm, kOpenMpi)).launcher, "Open MPI (job 1060110337)");
  EXPECT_EQ(read_from(with(kSlurm, {{"RANK", "0"},
                                    {"WORLD_SIZE", "2"},
                                    {"MASTER_ADDR", "a"},
                                    {"MASTER_PORT", "1"},
                                    {"TORCHELASTIC_RUN_ID", "r1"}}))
                .launcher,
            "torchrun (run r1)");
}

TEST(WorkerEnvironmentTest, AMasterInTheEnvironmentGoesBeforeTheFile) {
  const auto both = read_from(with(kSlurm, {{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "4000"}}));
  EXPECT_EQ(both.rendezvous, Rendezvous::static_master);
  EXPECT_EQ(both.master.text(), "node7:4000");
  EXPECT_EQ(read_from(with(kSlurm, {{"MASTER_PORT", "4000"}})).master.text(), "n1:4000");
  EXPECT_THAT(environment_error(with(kSlurm, {{"MASTER_ADDR", "node7"}})),
              HasSubstr("MASTER_ADDR is set and MASTER_PORT is not: set both, or neither"));
  EXPECT_THAT(environment_error(with(kOpenMpi, {{"MASTER_PORT", "4000"}})),
              HasSubstr("MASTER_PORT is set and MASTER_ADDR is not"));
}

TEST(WorkerEnvironmentTest, ContradictionsAreNamed) {
  EXPECT_THAT(environment_error(with(kSlurm, {{"WORLD_SIZE", "8"}})),
              HasSubstr("WORLD_SIZE is 8, and Slurm (job 7, step 3) started 4 ranks"));
  EXPECT_EQ(environment_error(with(kSlurm, {{"WORLD_SIZE", "4"}})), "");
  EXPECT_THAT(environment_error(with(kSlurm, {{"SLURM_PROCID", "4"}})),
              HasSubstr("the rank is 4 and the world size 4"));
  EXPECT_THAT(environment_error(with(kSlurm, {{"SLURM_LOCALID", "2"}})),
              HasSubstr("the local rank is 2 and the local world size 2"));
  EXPECT_THAT(environment_error(with(kSlurm, {{"SLURM_NODEID", "5"}})), HasSubstr("tells of 2 nodes"));
  EXPECT_THAT(environment_error(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}})),
              HasSubstr("SLURM_STEP_TASKS_PER_NODE is '2(x'"));
  EXPECT_THAT(environment_error(with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "four"}})),
              AllOf(HasSubstr("OMPI_COMM_WORLD_SIZE is 'four'"), HasSubstr("set by Open MPI")));
  EXPECT_THAT(environment_error({{"OMPI_COMM_WORLD_RANK", "0"}}),
              HasSubstr("not set: OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE"));
  EXPECT_THAT(environment_error({{"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "x"}}), HasSubstr("PMIX_RANK is set"));
}

TEST(WorkerEnvironmentTest, NamesEverythingThatIsWrongAtOnce) {
  EXPECT_THAT(environment_error({{"RANK", "1"}}), AllOf(HasSubstr("not set: WORLD_SIZE"), HasSubstr("phalanx launch")));
  EXPECT_THAT(environment_error({{"WORLD_SIZE", "2"}}), AllOf(HasSubstr("RANK, MASTER_ADDR, MASTER_PORT")));
  EXPECT_THAT(environment_error({{"RANK", "one"}, {"WORLD_SIZE", "0"}, {"MASTER_PORT", "70000"}, {"LOCAL_RANK", "0"}}),
              AllOf(HasSubstr("RANK is 'one'"), HasSubstr("WORLD_SIZE is '0'"), HasSubstr("LOCAL_WORLD_SIZE is not")));
  const Variables good{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  EXPECT_EQ(environment_error(good), "");
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
  // A single rank needs no port, but a wrong one is an error all the same.
  for (Variables alone : {Variables{}, Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}},
                          Variables{{"OMPI_COMM_WORLD_RANK", "0"},
                                    {"OMPI_COMM_WORLD_SIZE", "1"},
                                    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}}) {
    for (const char* port : {"0", "70000", "http"}) {
      alone["MASTER_PORT"] = port;
      EXPECT_THAT(environment_error(alone), HasSubstr(std::string("MASTER_PORT is '") + port)) << alone.size();
    }
  }
}

TEST(JobIdentity, IsTheSameForAllAttemptsOfAJob) {
  const auto identity_of = [](Variables variables) {
    return job_identity([variables](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
  };
  EXPECT_EQ(identity_of({}).name, "");
  const JobIdentity first = identity_of({{"TORCHELASTIC_RUN_ID", "none"}, {"TORCHELASTIC_RESTART_COUNT", "0"}});
  const JobIdentity second = identity_of({{"TORCHELASTIC_RUN_ID", "none"}, {"TORCHELASTIC_RESTART_COUNT", "1"}});
  EXPECT_EQ(first.attempt, 0);
  EXPECT_EQ(second.attempt, 1);
  EXPECT_EQ(first.name, second.name);
  EXPECT_THAT(first.name, HasSubstr("launcher none "));
  EXPECT_NE(identity_of({{"TORCHELASTIC_RUN_ID", "other"}}).name, first.name);
  // A requeued job keeps its number.
  const JobIdentity requeued = identity_of({{"SLURM_JOB_ID", "7"}, {"SLURM_RESTART_COUNT", "2"}});
  EXPECT_EQ(requeued.name, identity_of({{"SLURM_JOB_ID", "7"}}).name);
  EXPECT_EQ(requeued.attempt, 2);
}

}  // namespace
}  // namespace phalanx
