// The same program under mpirun and Slurm, with a rendezvous file, and starting its own ranks: real processes each
// time.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "phalanx/base/cpu.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/mpi/mpi.h"
#include "phalanx/launch/rendezvous/rendezvous_file.h"
#include "phalanx/launch/spawn.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/store/job_secret.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/free_address.h"

namespace phalanx {
namespace {

using Processes = std::vector<std::unique_ptr<CollectedProcess>>;

std::size_t files_in(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

// ---- init methods ----

class ByFile : public testing::Test {
 protected:
  Processes start(const std::vector<int>& ranks, int world_size, const std::vector<std::string>& more = {}) {
    Processes processes;
    for (const int rank : ranks) {
      std::vector<std::string> command{worker(), "--method",
                                       fmt::format("file://{}?rank={}&world_size={}", path(), rank, world_size)};
      command.insert(command.end(), more.begin(), more.end());
      processes.push_back(std::make_unique<CollectedProcess>(command));
    }
    return processes;
  }
  std::string path() const { return (folder_.path() / "rendezvous").string(); }
  TempDirectory folder_{"by-file"};
};

TEST_F(ByFile, RanksMeetAndLeaveNoFile) {
  // A file that an earlier job left behind; nothing listens at its address any more.
  RendezvousFile(path()).publish({free_address(), generate_job_secret()});
  std::string output;
  for (auto& process : start({2, 1, 0}, 3)) {
    EXPECT_EQ(process->wait(), 0) << process->output();
    output += process->output();
  }
  expect_sum_of_ranks(output, 3);
  EXPECT_THAT(output, AllOf(HasSubstr("lets in only who knows the job secret (from the rendezvous file)"),
                            HasSubstr("local 2 of 3"), HasSubstr("nothing is encrypted")));
  EXPECT_EQ(files_in(folder_.path()), 0);
}

// Without a given number of threads, the ranks share the cores that they may all use.
TEST_F(ByFile, RanksShareTheCores) {
  auto environment = clean_environment();
  environment.erase("OMP_NUM_THREADS");
  Processes processes;
  for (int rank = 0; rank < 2; ++rank)
    processes.push_back(std::make_unique<CollectedProcess>(
        std::vector<std::string>{worker(), "--method", fmt::format("file://{}?rank={}&world_size=2", path(), rank)},
        environment));
  for (auto& process : processes) EXPECT_EQ(process->wait(), 0) << process->output();
  const int threads = std::max(1, usable_cores() / 2);
  EXPECT_THAT(processes.front()->output(),
              HasSubstr(fmt::format(", {} thread{} a rank", threads, threads == 1 ? "" : "s")));
}

TEST_F(ByFile, RankZeroThatDoesNotComeIsNamed) {
  auto processes = start({1}, 2, {"--timeout-ms", "300"});
  EXPECT_EQ(processes.front()->wait(), 1);
  EXPECT_THAT(processes.front()->output(), AllOf(HasSubstr("rank 0 has not come within 0.3 s"), HasSubstr(path())));
}

TEST_F(ByFile, OtherRanksThatDoNotComeAreNamedAndTheFileGoes) {
  auto processes = start({0}, 3, {"--timeout-ms", "300"});
  EXPECT_EQ(processes.front()->wait(), 1);
  EXPECT_THAT(processes.front()->output(), HasSubstr("of 3 ranks these have not come within 0.3 s: 1, 2"));
  EXPECT_EQ(files_in(folder_.path()), 0);
}

class ByTcp : public testing::Test {
 protected:
  static std::unique_ptr<CollectedProcess> start(const std::string& address, int rank, const std::string& secret = "",
                                                 std::chrono::milliseconds timeout = kStartLimit) {
    auto environment = clean_environment();
    if (!secret.empty()) environment["PHALANX_JOB_SECRET"] = secret;
    return std::make_unique<CollectedProcess>(
        std::vector<std::string>{worker(), "--timeout-ms", std::to_string(timeout.count()), "--method",
                                 fmt::format("tcp://{}?rank={}&world_size=2", address, rank)},
        environment);
  }
};

TEST_F(ByTcp, APortInUseAndANameThatDoesNotResolveAreSaidAtOnce) {
  const UniqueFd taken = listen_on({"127.0.0.1", 0});
  const std::string address = fmt::format("127.0.0.1:{}", local_port(taken.get()));
  auto host = start(address, 0);
  EXPECT_EQ(host->wait(), 1);
  EXPECT_THAT(host->output(), HasSubstr("cannot listen on " + address + ": the port is in use by another program"));
  auto lost = start("no-such-host.invalid:4000", 1);
  EXPECT_EQ(lost->wait(), 1);
  EXPECT_THAT(lost->output(),
              AllOf(HasSubstr("rank 1 did not reach the rendezvous with rank 0, which is to host the store at "),
                    HasSubstr("'no-such-host.invalid' does not resolve")));
  const HostPort nobody = free_address();
  auto early = start(nobody.text(), 1, "", std::chrono::milliseconds(200));
  EXPECT_EQ(early->wait(), 1);
  EXPECT_THAT(early->output(), AllOf(HasSubstr("host the store at " + nobody.text()), HasSubstr("nothing listens")));
}

// A process with another secret takes rank 1's place first. It is refused with a message, and the job continues.
TEST_F(ByTcp, ASecretKeepsOthersOut) {
  const HostPort address = free_address();
  const std::string secret = generate_job_secret();
  auto host = start(address.text(), 0, secret);
  auto intruder = start(address.text(), 1, generate_job_secret());
  EXPECT_EQ(intruder->wait(), 2);
  EXPECT_THAT(intruder->output(), HasSubstr("the job secret of this process is not the store's"));
  auto without = start(address.text(), 1);
  EXPECT_EQ(without->wait(), 2);
  EXPECT_THAT(without->output(), HasSubstr("asks for the job's secret, and this process has none"));
  auto member = start(address.text(), 1, secret);
  EXPECT_EQ(member->wait(), 0) << member->output();
  EXPECT_EQ(host->wait(), 0) << host->output();
  EXPECT_THAT(host->output(),
              AllOf(HasSubstr("refused 127.0.0.1:"), HasSubstr("its job secret is another one"),
                    HasSubstr("it has no job secret"), HasSubstr("(from PHALANX_JOB_SECRET)"), Not(HasSubstr(secret))));
  expect_sum_of_ranks(host->output() + member->output(), 2);
}

// ---- launchers ----

// Slurm's variables as srun sets them, on two nodes, but without Slurm. The rendezvous file is in the folder of the
// job.
TEST(SlurmVariables, RanksMeetInTheFolderOfTheJob) {
  TempDirectory folder("slurm");
  Processes processes;
  for (int rank = 0; rank < 4; ++rank) {
    auto environment = clean_environment();
    for (const auto& [name, value] : std::map<std::string, std::string>{{"SLURM_PROCID", std::to_string(rank)},
                                                                        {"SLURM_LOCALID", std::to_string(rank % 2)},
                                                                        {"SLURM_NODEID", std::to_string(rank / 2)},
                                                                        {"SLURM_JOB_ID", "17"},
                                                                        {"SLURM_STEP_ID", "0"},
                                                                        {"SLURM_STEP_NUM_TASKS", "4"},
                                                                        {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                                                                        {"SLURM_SUBMIT_DIR", folder.path().string()}})
      environment[name] = value;
    processes.push_back(std::make_unique<CollectedProcess>(std::vector<std::string>{worker()}, environment));
  }
  std::string output;
  for (auto& process : processes) {
    EXPECT_EQ(process->wait(), 0) << process->output();
    output += process->output();
  }
  expect_sum_of_ranks(output, 4);
  EXPECT_THAT(output, AllOf(HasSubstr("rank 0 of 4, from Slurm (job 17, step 0)"),
                            HasSubstr("rank 3 of 4, local 1 of 2"), HasSubstr("(from the rendezvous file)")));
  EXPECT_EQ(files_in(folder.path()), 0);
}

void expect_pmi_ranks_to_meet(Processes& processes, const std::filesystem::path& folder, const std::string& launcher) {
  std::string output;
  for (auto& process : processes) {
    EXPECT_EQ(process->wait(), 0) << process->output();
    output += process->output();
  }
  expect_sum_of_ranks(output, 2);
  EXPECT_THAT(output, AllOf(HasSubstr("rank 0 of 2, from " + launcher), HasSubstr("rank 1 of 2, local 1 of 2"),
                            HasSubstr("(from the rendezvous file)")));
  EXPECT_EQ(files_in(folder), 0);
}

TEST(PmiVariables, RanksMeetByTheJobsName) {
  TempDirectory folder("pmi");
  Processes processes;
  for (int rank = 0; rank < 2; ++rank) {
    auto environment = clean_environment();
    for (const auto& [name, value] : EnvironmentMap{{"PMI_RANK", std::to_string(rank)},
                                                    {"PMI_SIZE", "2"},
                                                    {"PMI_JOBID", "job 17/3"},
                                                    {"MPI_LOCALRANKID", std::to_string(rank)},
                                                    {"MPI_LOCALNRANKS", "2"},
                                                    {"PHALANX_RENDEZVOUS_DIR", folder.path().string()}})
      environment[name] = value;
    processes.push_back(std::make_unique<CollectedProcess>(std::vector<std::string>{worker()}, environment));
  }
  expect_pmi_ranks_to_meet(processes, folder.path(), "PMI (job job 17/3)");
}

// MPICH's ranks have no common job name. They only share the ancestor process that started the ranks of a node. Between
// it and each rank there is another process.
TEST(PmiVariables, WithoutANameRanksMeetByTheProxyThatHasStartedThem) {
  TempDirectory folder("pmi"), programs("programs");
  const std::string proxy = (programs.path() / "hydra_pmi_proxy").string();
  std::ofstream(proxy)
      << "#!/bin/sh\nfor rank in 0 1; do\n  PMI_RANK=$rank MPI_LOCALRANKID=$rank sh -c '\"$0\"; exit $?' "
         "\"$1\" &\n  processes=\"$processes $!\"\ndone\nfor one in $processes; do wait $one || exit 1; "
         "done\n";
  std::filesystem::permissions(proxy, std::filesystem::perms::owner_all);
  auto environment = clean_environment();
  for (const auto& [name, value] :
       EnvironmentMap{{"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}, {"PHALANX_RENDEZVOUS_DIR", folder.path().string()}})
    environment[name] = value;
  Processes processes;
  processes.push_back(std::make_unique<CollectedProcess>(std::vector<std::string>{proxy, worker()}, environment));
  expect_pmi_ranks_to_meet(processes, folder.path(), "PMI");
}

// The tests with a complete Slurm are scripts/slurm_tests.sh. This test runs if SLURM_CONF names a running Slurm.
TEST(Slurm, SrunStartsEveryRank) {
  const std::string srun = find_program("srun");
  if (srun.empty() || !current_environment().contains("SLURM_CONF"))
    GTEST_SKIP() << "there is no Slurm here (srun in PATH and SLURM_CONF)";
  TempDirectory folder("slurm");
  auto environment = clean_environment();
  environment["PHALANX_RENDEZVOUS_DIR"] = folder.path().string();
  CollectedProcess process({srun, "--immediate=60", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", worker()},
                           environment);
  EXPECT_EQ(process.wait(), 0) << process.output();
  expect_sum_of_ranks(process.output(), 4);
  EXPECT_THAT(process.output(), AllOf(HasSubstr("from Slurm (job "), HasSubstr("rank 3 of 4, local 1 of 2")));
}

TEST(OpenMpi, MpirunStartsEveryRank) {
  const std::string mpirun = find_program("mpirun");
  if (mpirun.empty()) GTEST_SKIP() << "there is no mpirun in PATH";
  auto environment = clean_environment();
  environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1";
  {
    CollectedProcess version({mpirun, "--version"}, environment);
    version.wait();
    if (version.output().find("Open MPI") == std::string::npos)
      GTEST_SKIP() << mpirun << " is not Open MPI's: " << version.output();
  }
  CollectedProcess process({mpirun, "--oversubscribe", "-np", "4", worker()}, environment);
  EXPECT_EQ(process.wait(), 0) << process.output();
  expect_sum_of_ranks(process.output(), 4);
  EXPECT_THAT(process.output(), AllOf(HasSubstr("rank 0 of 4, from Open MPI (job "), HasSubstr("local 3 of 4, shm"),
                                      HasSubstr("(from the rendezvous file)")));
  if (!mpi_library()) return;
  CollectedProcess by_mpi({mpirun, "--oversubscribe", "-np", "4", worker(), "--backend", "mpi"}, environment);
  EXPECT_EQ(by_mpi.wait(), 0) << by_mpi.output();
  expect_sum_of_ranks(by_mpi.output(), 4);
  EXPECT_THAT(by_mpi.output(), AllOf(HasSubstr("backend: mpi, 4 ranks on this node"), HasSubstr("local 3 of 4, mpi")));
  CollectedProcess by_two({mpirun, "--oversubscribe", "-np", "4", worker(), "--backend", "shm+mpi"}, environment);
  EXPECT_EQ(by_two.wait(), 0) << by_two.output();
  expect_sum_of_ranks(by_two.output(), 4);
  EXPECT_THAT(by_two.output(), HasSubstr("backend: shm, 4 ranks on this node")) << "one machine, by proof";
}

TEST(Spawn, AProgramStartsItsOwnRanks) {
  CollectedProcess process({worker(), "--spawn", "3"});
  EXPECT_EQ(process.wait(), 0) << process.output();
  expect_sum_of_ranks(process.output(), 3);
  EXPECT_THAT(process.output(), HasSubstr("from phalanx launch"));
}

TEST(Spawn, LeavesAnotherLaunchersRanksAlone) {
  CollectedProcess process({built_program("launch_test_program"), "supervise", "2", worker(), "--spawn", "3"});
  EXPECT_EQ(process.wait(), 0) << process.output();
  expect_sum_of_ranks(process.output(), 2);
}

TEST(Spawn, ThereIsARankForEachGpuOrForEachCore) {
  const TempDirectory machine("devices");
  EXPECT_EQ(ranks_for_devices(machine.path()), usable_cores());
  std::filesystem::create_directories(machine.path() / "dev");
  for (const char* gpu : {"nvidia0", "nvidia1", "nvidia2"}) std::ofstream(machine.path() / "dev" / gpu);
  if (std::getenv("CUDA_VISIBLE_DEVICES") != nullptr) GTEST_SKIP() << "CUDA_VISIBLE_DEVICES is set";
  EXPECT_EQ(ranks_for_devices(machine.path()), 3);
}

TEST(Spawn, AFailureIsToldAndIsTheStatus) {
  CollectedProcess process({worker(), "--spawn", "2", "--backend", "gluu"});
  EXPECT_EQ(process.wait(), 2);
  EXPECT_EQ(times_in(process.output(), "backend 'gluu' (did you mean 'gloo'?)"), 1) << process.output();
}

}  // namespace
}  // namespace phalanx
