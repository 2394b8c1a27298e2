// The mpi backend under mpirun: the suite, misuse, deaths and time-outs. A case starts ranks of this same program that
// run one function of mpi_ranks_test.cc; mpirun and the test see what they print.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/quiet_fork.h"
#include "phalanx/base/testing/under_sanitizer.h"
#include "phalanx/comm/backends/mpi/mpi.h"
#include "phalanx/comm/backends/mpi/testing/mpi_ranks.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_calls.h"
#include "phalanx/store/hash_store.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using std::chrono::seconds;

std::string why_no_mpirun() {
  if (!mpi_library()) return "this build has no MPI";
  const std::string path = std::getenv("PATH") == nullptr ? "" : std::getenv("PATH");
  for (std::size_t at = 0; at <= path.size();) {
    const std::size_t colon = std::min(path.find(':', at), path.size());
    if (access((path.substr(at, colon - at) + "/mpirun").c_str(), X_OK) == 0) return {};
    at = colon + 1;
  }
  return "there is no mpirun on the PATH";
}

struct MpiJob {
  int status = -1;  // mpirun's
  std::string output;
  int passed() const {
    int count = 0;
    for (std::size_t at = 0; (at = output.find(" passed\n", at)) != std::string::npos; ++at) ++count;
    return count;
  }
};

MpiJob run_under_mpirun_once(int world, const std::string& body, seconds limit) {
  TcpStoreServer server;
  const std::string store = server.address().text();
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string count = std::to_string(world);
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe");
  const auto begin = std::chrono::steady_clock::now();
  const pid_t child = quiet_fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // mpirun then ends its ranks
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMPI_MCA_btl_base_warn_component_unused", "0", 1);
    setenv("PHALANX_TEST_STORE", store.c_str(), 1);
    setenv("PHALANX_TEST_BODY", body.c_str(), 1);
    // The ranks run the one case that is named, whatever part of the cases this process runs.
    for (const char* const name : {"GTEST_FILTER", "GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) unsetenv(name);
    execlp("mpirun", "mpirun", "-np", count.c_str(), "--oversubscribe", "--bind-to", "none", program.c_str(),
           "--gtest_brief=1", "--gtest_also_run_disabled_tests", "--gtest_filter=MpiRanks.DISABLED_Body", nullptr);
    _exit(127);
  }
  close(ends[1]);
  MpiJob job;
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(begin + limit - std::chrono::steady_clock::now());
    pollfd readable{ends[0], POLLIN, 0};
    if (left.count() <= 0 || poll(&readable, 1, static_cast<int>(left.count())) == 0) {
      job.output += fmt::format("\nstill running after {} s: ended by the test\n", limit.count());
      kill(child, SIGTERM);
      break;
    }
    char buffer[4096];
    const auto length = read(ends[0], buffer, sizeof buffer);
    if (length <= 0) break;
    job.output.append(buffer, static_cast<std::size_t>(length));
  }
  close(ends[0]);
  waitpid(child, &job.status, 0);
  return job;
}

// Repeats the run if a rank found an error late; see again_if_late().
MpiJob run_under_mpirun(int world, const std::string& body, seconds limit = seconds(120)) {
  limit *= kSlowdown;
  MpiJob job = run_under_mpirun_once(world, body, limit);
  for (int more = 0; more < 2 && job.output.find(": late: ") != std::string::npos; ++more) {
    std::cerr << "tried again, since this was late:\n" << job.output << "\n";
    job = run_under_mpirun_once(world, body, limit);
  }
  return job;
}

#define PHALANX_NEEDS_MPIRUN() \
  if (const std::string why = why_no_mpirun(); !why.empty()) GTEST_SKIP() << "skipped: " << why

class MpiWorlds : public ::testing::TestWithParam<int> {};

TEST_P(MpiWorlds, PassTheSuiteAndFailClearly) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(GetParam(), "suite");
  EXPECT_EQ(job.passed(), GetParam()) << job.output;
}

INSTANTIATE_TEST_SUITE_P(Processes, MpiWorlds, ::testing::Values(1, 2, 3, 4, 8));

// 16-bit floats and NaN, 10,000 asynchronous operations, one thread at a time in MPI, and ranks that are not those of
// MPI.
TEST(MpiBackend, KeepsTheContractInDetail) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(3, "others");
  EXPECT_EQ(job.passed(), 3) << job.output;
  EXPECT_EQ(job.status, 0) << job.output;  // MPI was finalised everywhere
}

TEST(MpiBackend, CarriesTwoLevels) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(3, "two_levels");
  EXPECT_EQ(job.passed(), 3) << job.output;
}

TEST(MpiBackend, CarriesWhatNcclDoesNot) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(4, "nccl_levels");
  EXPECT_EQ(job.passed(), 4) << job.output;
}

// A folder that the ranks find in their environment.
class MpiFolder {
 public:
  MpiFolder() { setenv("PHALANX_TEST_FOLDER", folder_.path().c_str(), 1); }
  ~MpiFolder() { unsetenv("PHALANX_TEST_FOLDER"); }
  bool has(const char* name) const { return std::filesystem::exists(folder_.path() / name); }
  std::string text(const char* name) const {
    std::stringstream text;
    text << std::ifstream(folder_.path() / name).rdbuf();
    return text.str();
  }
  std::filesystem::file_time_type written(const char* name) const {
    return std::filesystem::last_write_time(folder_.path() / name);
  }

 private:
  TempDirectory folder_;
};

std::string mpi_death_at(const FaultCall& call, bool beside_nccl) {
  const int victim = beside_nccl ? mpi_ranks::kHierarchicalVictim : 1;
  const MpiFolder folder;
  setenv("PHALANX_TEST_CALL", call.name.c_str(), 1);
  const MpiJob job = run_under_mpirun(beside_nccl ? 4 : 3, beside_nccl ? "levels_death" : "death", seconds(60));
  unsetenv("PHALANX_TEST_CALL");
  const std::string said = folder.text("said");
  try {
    mpi_ranks::expect(job.status != 0 && folder.has("dies"), "the rank did not die\n" + job.output);
    const std::string dead = fmt::format("rank {} has died", victim);
    mpi_ranks::expect_in(said, {dead.c_str(), "group 'the world'"});
    // The ranks that reported it before mpirun ended them.
    std::istringstream lines(said);
    for (std::string line; std::getline(lines, line);) {
      if (line.find(" has died") != std::string::npos) mpi_ranks::expect_in(line, {dead.c_str()});
      if (line.find(", rank ") != std::string::npos) require_told(call, line, mpi_ranks::kDeathCount, victim);
    }
    require_told(call, said, mpi_ranks::kDeathCount, victim);
    // A group that is being made holds no memory of the caller. Beside NCCL, MPI has staging memory: the ranks that
    // wait for the streams' part get the error, and mpirun ends the job.
    if (call.name != "split") mpi_ranks::expect_in(said, {"op "});
    if (call.name != "split" && (!beside_nccl || !call.moves_tensors)) mpi_ranks::expect_in(said, {"ends the job"});
  } catch (const std::exception& error) {
    return fmt::format("{}: {}\n{}{}\n", call.name, error.what(), said, job.output);
  }
  const auto took = folder.written("said") - folder.written("dies");
  return took < seconds(1) ? ""
                           : fmt::format("late: {}: after {} ms\n", call.name, took / std::chrono::milliseconds(1));
}

// Each call takes an mpirun, so the default tests take some; with PHALANX_ALL_CASES=1 (make deaths) all.
void expect_told_of_deaths(bool beside_nccl, const std::vector<std::string>& slice) {
  std::size_t ran = 0;
  for (const FaultCall& call : fault_calls(beside_nccl ? mpi_ranks::kHierarchicalVictim : 1)) {
    if (call.prepare) continue;  // symmetric memory is shm's
    if (!takes_all_cases() && std::find(slice.begin(), slice.end(), call.name) == slice.end()) continue;
    ++ran;
    EXPECT_EQ(again_if_late([&] { return mpi_death_at(call, beside_nccl); }), "");
  }
  EXPECT_GE(ran, slice.size());
}

TEST(MpiBackend, ADeadRankIsNamedWithinASecondAndEndsTheJob) {
  PHALANX_NEEDS_MPIRUN();
  expect_told_of_deaths(false, {"uneven all_gather", "recv", "split"});
}

TEST(MpiBackend, ADeadRankBesideNcclIsNamedWithinASecondAndEndsTheJob) {
  PHALANX_NEEDS_MPIRUN();
  expect_told_of_deaths(true, {"all_gather", "send", "broadcast_bytes"});
}

TEST(MpiBackend, ATimeOutAmidstDataEndsTheJobAndKeepsTheTensors) {
  PHALANX_NEEDS_MPIRUN();
  const MpiFolder folder;
  const MpiJob job = run_under_mpirun(2, "stopped", seconds(60));
  EXPECT_NE(job.status, 0);
  for (const char* part : {"broadcast(float32[30000000], root 0)", "timed out after", "rank 1", "ends the job"})
    EXPECT_NE(job.output.find(part), std::string::npos) << part << "\n" << job.output;
  EXPECT_FALSE(folder.has("freed")) << "the tensor was freed while MPI had it";
  EXPECT_THAT(folder.text("traces/rank_0.json"), HasSubstr("timed out after")) << job.output;
}

TEST(MpiBackend, AStoppedRankIsToldWithinTheHeartbeatLimit) {
  PHALANX_NEEDS_MPIRUN();
  const MpiJob job = run_under_mpirun(3, "heartbeat", seconds(60));
  EXPECT_EQ(job.passed(), 3) << job.output;
}

TEST(MpiBackend, ARankStoppedAmidstDataEndsTheJobWithinTheHeartbeatLimit) {
  PHALANX_NEEDS_MPIRUN();
  const MpiFolder folder;
  const MpiJob job = run_under_mpirun(3, "stopped_amidst_data", seconds(60));
  EXPECT_NE(job.status, 0);
  const std::string said = folder.text("said");
  for (const char* part : {"rank 1 is stopped (SIGSTOP)", "broadcast(float32[30000000], root 0)", "group 'the world'",
                           "op ", "ends the job"})
    EXPECT_NE(said.find(part), std::string::npos) << part << "\n" << said << job.output;
  // Ten times the limit is too late on any machine.
  EXPECT_LT(folder.written("said") - folder.written("stops"), 10 * mpi_ranks::kShortHeartbeat);
}

TEST(MpiBackend, AProgramsOwnMpiIsUsedAndNotFinalised) {
  PHALANX_NEEDS_MPIRUN();
  MpiJob job = run_under_mpirun(2, "own_mpi");
  EXPECT_EQ(job.passed(), 2) << job.output;
  EXPECT_EQ(job.status, 0) << job.output;
  job = run_under_mpirun(1, "own_mpi_without_threads");
  EXPECT_EQ(job.passed(), 1) << job.output;
}

#ifdef PHALANX_HAVE_MPI
TEST(MpiBackend, ARankThatSrunStartsWithoutPmixIsToldWhatToDo) {
  const std::map<std::string, std::string> variables{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}};
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  mpi_ranks::expect_in(require_error<ConfigError>([] { make_mpi_communicator(std::make_shared<HashStore>(), 0, 1); }),
                       {"srun --mpi=pmix", "mpirun"});
  for (const auto& [name, value] : variables) unsetenv(name.c_str());
}
#endif

#ifndef PHALANX_HAVE_MPI
TEST(MpiBackend, ABuildWithoutMpiSaysSo) {
  EXPECT_EQ(mpi_library(), std::nullopt);
  EXPECT_THAT(require_error<ConfigError>([] { make_mpi_communicator(nullptr, 0, 1); }),
              HasSubstr("this build has no MPI"));
}
#endif

}  // namespace
}  // namespace phalanx
