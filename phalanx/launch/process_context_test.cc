// init_from_environment() under every launcher, with real processes.
#include "phalanx/launch/process_context.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/comm/tcp_store.h"
#include "phalanx/launch/child_process.h"

namespace phalanx {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string built_program(const std::string& name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}

// This process's environment without what a launcher around the tests may have set.
EnvironmentMap clean_environment() {
  EnvironmentMap result = current_environment();
  std::erase_if(result, [](const auto& entry) {
    const auto& name = entry.first;
    return name == "RANK" || name == "WORLD_SIZE" || name.starts_with("LOCAL_") || name.starts_with("MASTER_") ||
           name.starts_with("TORCHELASTIC_") || name.starts_with("PHALANX_");
  });
  result["OMP_NUM_THREADS"] = "1";
  return result;
}

// A process with its output collected.
class CollectedProcess {
 public:
  explicit CollectedProcess(std::vector<std::string> command, EnvironmentMap environment = clean_environment())
      : folder_("process") {
    const UniqueFd out(open((folder_.path() / "out").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    ChildSpec spec;
    spec.command = std::move(command);
    spec.environment = std::move(environment);
    spec.stdout_fd = spec.stderr_fd = out.get();
    sigemptyset(&spec.signal_mask);
    pid_ = spawn_child(spec);
  }
  ~CollectedProcess() {
    if (pid_ <= 0) return;
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  int wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string output() const {
    std::ifstream file(folder_.path() / "out");
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  TempDirectory folder_;
  pid_t pid_ = -1;
};

TEST(ProcessContextTest, ASingleProcessIsAWorldOfOne) {
  CollectedProcess process({built_program("launch_test_worker")});
  EXPECT_EQ(process.wait(), 0);
  EXPECT_THAT(process.output(), HasSubstr("rank 0 of 1, local 0 of 1, local on "));
}

class UnderPhalanxLaunch : public testing::TestWithParam<const char*> {};

TEST_P(UnderPhalanxLaunch, RanksMeetAndSum) {
  const std::string backend = GetParam();
  CollectedProcess process({built_program("launch_test_program"), "supervise", "3", built_program("launch_test_worker"),
                            "--backend", backend});
  EXPECT_EQ(process.wait(), 0) << process.output();
  const std::string expected = backend == "gloo" ? "gloo" : "shm";
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_THAT(process.output(), HasSubstr(fmt::format("rank {} of 3, local {} of 3, {} on ", rank, rank, expected)));
  EXPECT_THAT(process.output(),
              AllOf(HasSubstr("sum 6"), HasSubstr("backend: " + expected + ", 3 ranks on this machine")));
}

INSTANTIATE_TEST_SUITE_P(Backends, UnderPhalanxLaunch, testing::Values("auto", "shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

TEST(ProcessContextTest, AWrongBackendIsToldOnce) {
  CollectedProcess process({built_program("launch_test_program"), "supervise", "2", built_program("launch_test_worker"),
                            "--backend", "gluu"});
  EXPECT_EQ(process.wait(), 2);
  EXPECT_THAT(process.output(),
              HasSubstr("backend 'gluu' (did you mean 'gloo'?): expected auto, shm, gloo or local\n"));
  EXPECT_EQ(process.output().find("gluu"), process.output().rfind("gluu"));
}

// As torch's env:// by hand: rank 0 hosts the store at MASTER_ADDR:MASTER_PORT.
TEST(ProcessContextTest, StaticMasterAndTcpMethod) {
  for (const bool by_environment : {true, false}) {
    HostPort address;
    { address = TcpStoreServer().address(); }  // a port that is free now
    std::vector<std::unique_ptr<CollectedProcess>> ranks;
    for (int rank = 1; rank >= 0; --rank) {
      auto environment = clean_environment();
      std::vector<std::string> command{built_program("launch_test_worker")};
      if (by_environment) {
        environment["RANK"] = std::to_string(rank);
        environment["WORLD_SIZE"] = std::to_string(2);
        environment["MASTER_ADDR"] = "localhost";
        environment["MASTER_PORT"] = std::to_string(address.port);
      } else {
        for (const std::string& word : {std::string("--method"), "tcp://" + address.text(), std::string("--rank"),
                                        std::to_string(rank), std::string("--world-size"), std::to_string(2)})
          command.push_back(word);
      }
      ranks.push_back(std::make_unique<CollectedProcess>(command, environment));
    }
    for (auto& process : ranks) {
      EXPECT_EQ(process->wait(), 0) << process->output();
      EXPECT_THAT(process->output(), AllOf(HasSubstr(" of 2, shm on "), HasSubstr("sum 3")));
    }
  }
}

TEST(ProcessContextTest, ThoseWhoDoNotComeOrComeTwiceOrDisagreeAreNamed) {
  TcpStoreServer server;
  const auto start = [&](int rank, int world_size) {
    auto environment = clean_environment();
    environment["RANK"] = std::to_string(rank);
    environment["WORLD_SIZE"] = std::to_string(world_size);
    environment["PHALANX_STORE"] = server.address().text();
    return std::make_unique<CollectedProcess>(
        std::vector<std::string>{built_program("launch_test_worker"), "--timeout-ms", "1500"}, environment);
  };
  auto first = start(1, 4);
  TcpStore(server.address()).wait({"init/place/1"}, std::chrono::seconds(20));
  auto twice = start(1, 4);
  auto disagrees = start(2, 5);
  EXPECT_EQ(twice->wait(), 1);
  EXPECT_THAT(twice->output(), HasSubstr("rank 1 was started twice"));
  EXPECT_EQ(disagrees->wait(), 1);
  EXPECT_THAT(disagrees->output(), HasSubstr("rank 2 was started with a world size of 5 and another rank with 4"));
  EXPECT_EQ(first->wait(), 1);
  EXPECT_THAT(first->output(), AllOf(HasSubstr(server.address().text()),
                                     HasSubstr("of 4 ranks these have not come within 1.5 s: 0, 2, 3")));
}

std::string find_torchrun() {
  std::vector<std::filesystem::path> folders;
  for (auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path(); folder != folder.root_path();
       folder = folder.parent_path())
    folders.push_back(folder / ".venv/bin");
  std::string path = current_environment()["PATH"];
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    folders.emplace_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  for (const auto& folder : folders)
    if (std::filesystem::exists(folder / "torchrun")) return (folder / "torchrun").string();
  return "";
}

TEST(ProcessContextTest, TheSameProgramRunsUnderTorchrun) {
  const std::string torchrun = find_torchrun();
  if (torchrun.empty()) GTEST_SKIP() << "torchrun is neither in a .venv above the build folder nor in PATH";
  CollectedProcess process(
      {torchrun, "--standalone", "--nproc-per-node", "2", "--no-python", built_program("launch_test_worker")});
  EXPECT_EQ(process.wait(), 0) << process.output();
  EXPECT_THAT(process.output(), AllOf(HasSubstr("rank 0 of 2, local 0 of 2, shm on "),
                                      HasSubstr("rank 1 of 2, local 1 of 2, shm on "), HasSubstr("sum 3")));
}

}  // namespace
}  // namespace phalanx
