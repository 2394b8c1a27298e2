// Flags of `phalanx launch` through the real program, where what they do shows in processes only.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/comm/tcp_store.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/launch/testing/launcher_process.h"

namespace phalanx::cli {
namespace {

// `phalanx launch FLAGS sh -c SCRIPT FOLDER`; the script writes its notes to "$0".
std::unique_ptr<CollectedProcess> launched(std::vector<std::string> flags, const std::string& script,
                                           const TempDirectory& notes) {
  flags.insert(flags.begin(), {built_program("phalanx"), "launch"});
  flags.insert(flags.end(), {"sh", "-c", script, notes.path().string()});
  auto environment = clean_environment();
  environment["PHALANX_JOB_SECRET"] = "the secret of this test";
  return std::make_unique<CollectedProcess>(std::move(flags), std::move(environment));
}

TEST(LaunchProgramTest, ASignalThatIsNamedEndsTheJobAfterThePatienceThatIsGiven) {
  const TempDirectory notes("notes");
  const auto launcher = launched({"-n", "2", "--signals-to-handle=USR2", "--shutdown-timeout=1"},
                                 "trap '' USR2 TERM; echo $$ > $0/part.$RANK; mv $0/part.$RANK $0/pid.$RANK; "
                                 "while :; do sleep 1; done",
                                 notes);
  const std::vector<pid_t> ranks{noted_pid(notes, "pid.0"), noted_pid(notes, "pid.1")};
  const auto begin = std::chrono::steady_clock::now();
  kill(launcher->pid(), SIGUSR2);
  EXPECT_EQ(launcher->wait(), 128 + SIGUSR2) << launcher->output();
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took, std::chrono::milliseconds(900));
  EXPECT_LT(took, std::chrono::seconds(20));  // without the flag: 30
  for (const pid_t rank : ranks) EXPECT_TRUE(comes_true([&] { return is_gone(rank); })) << rank;
}

TEST(LaunchProgramTest, OtherNodesAreToldTheLocalAddress) {
  const HostPort endpoint = TcpStoreServer().address();  // a port that was free a moment ago
  const TempDirectory notes("notes");
  std::vector<std::unique_ptr<CollectedProcess>> nodes;
  for (int node = 0; node < 2; ++node) {
    std::vector<std::string> flags{"-n",
                                   "1",
                                   "--nnodes=2",
                                   "--node-rank=" + std::to_string(node),
                                   "--master-addr=127.0.0.1",
                                   "--master-port=" + std::to_string(endpoint.port)};
    if (node == 0) flags.emplace_back("--local-addr=127.0.0.2");
    nodes.push_back(launched(flags, "echo $MASTER_ADDR $PHALANX_STORE > $0/address.$RANK", notes));
  }
  for (const auto& node : nodes) EXPECT_EQ(node->wait(), 0) << node->output();
  for (const char* rank : {"address.0", "address.1"})
    EXPECT_THAT(note_of(notes, rank), testing::StartsWith("127.0.0.2 127.0.0.2:"));
}

}  // namespace
}  // namespace phalanx::cli
