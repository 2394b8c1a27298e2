// The same program under a real torchrun: one on one node, and two that stand for two nodes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/job_secret.h"
#include "phalanx/comm/tcp_store.h"
#include "phalanx/launch/agent_store.h"
#include "phalanx/launch/own_address.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/launch/testing/launcher_process.h"

namespace phalanx {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class Torchrun : public testing::Test {
 protected:
  void SetUp() override {
    std::vector<std::filesystem::path> folders;
    for (auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path(); folder != folder.root_path();
         folder = folder.parent_path())
      folders.push_back(folder / ".venv/bin");
    program_ = find_program("torchrun", folders);
    if (program_.empty()) GTEST_SKIP() << "torchrun is neither in a .venv above the build folder nor in PATH";
  }

  // One of two nodes on this machine's loopback, each with a rank.
  std::unique_ptr<CollectedProcess> start_node(int node, const EnvironmentMap& more = {}) const {
    auto environment = clean_environment();
    for (const auto& [name, value] : more) environment[name] = value;
    return std::make_unique<CollectedProcess>(
        std::vector<std::string>{program_, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank",
                                 std::to_string(node), "--master-addr", "127.0.0.1", "--master-port",
                                 std::to_string(agent_.port), "--rdzv-id", "job9", "--no-python", worker(), "--notes",
                                 notes_.path().string()},
        environment);
  }
  // What torchrun's store, which lets everybody in, tells of ours.
  std::string passed_on() const {
    for (int rank = 0; rank < 2; ++rank) noted_pid(notes_, fmt::format("sum.{}", rank));
    return exchange_through_agent_store(agent_, "phalanx/job9/0/store", nullptr, std::chrono::seconds(20));
  }

  std::string program_;
  const HostPort agent_ = TcpStoreServer().address();  // a port that was free a moment ago
  TempDirectory notes_{"notes"};
};

TEST_F(Torchrun, StartsEveryRank) {
  CollectedProcess process({program_, "--standalone", "--nproc-per-node", "2", "--no-python", worker()});
  EXPECT_EQ(process.wait(), 0) << process.output();
  expect_sum_of_ranks(process.output(), 2);
  EXPECT_THAT(process.output(),
              AllOf(HasSubstr("rank 0 of 2, from torchrun (run "), HasSubstr("rank 1 of 2, local 1 of 2, shm on "),
                    // On one node a private file carries a secret that nobody had to set.
                    HasSubstr("lets in only who knows the job secret (from the rendezvous file)")));
}

TEST_F(Torchrun, OnTwoNodesTheSecretComesFromEachNodesVariableOrFile) {
  const std::string secret = generate_job_secret();
  const std::string file = (notes_.path() / "secret").string();
  std::ofstream(file) << secret << "\n";
  std::filesystem::permissions(file, std::filesystem::perms::owner_read);
  const auto first = start_node(0, {{"PHALANX_JOB_SECRET", secret}});
  const auto second = start_node(1, {{"PHALANX_JOB_SECRET_FILE", file}});
  const std::string passed = passed_on();
  const HostPort store = parse_host_port(passed, "what torchrun's store passes on");
  EXPECT_EQ(passed, store.text()) << "nothing but an address";
  EXPECT_THROW(TcpStore(store, {.connect_timeout = std::chrono::seconds(5)}), ConfigError) << "who has no secret";
  EXPECT_NO_THROW(TcpStore(store, {.connect_timeout = std::chrono::seconds(5), .secret = secret}));
  write_note(notes_, "go");
  for (const auto* node : {&first, &second}) EXPECT_EQ((*node)->wait(), 0) << (*node)->output();
  expect_sum_of_ranks(first->output() + second->output(), 2);
  EXPECT_THAT(first->output(), AllOf(HasSubstr("lets in only who knows the job secret (from PHALANX_JOB_SECRET)"),
                                     Not(HasSubstr("lets in whoever")), Not(HasSubstr(secret))));
}

TEST_F(Torchrun, OnTwoNodesWithoutASecretThereIsAWarning) {
  const auto first = start_node(0), second = start_node(1);
  const HostPort store = parse_host_port(passed_on(), "what torchrun's store passes on");
  EXPECT_NO_THROW(TcpStore(store, {.connect_timeout = std::chrono::seconds(5)}));
  write_note(notes_, "go");
  for (const auto* node : {&first, &second}) EXPECT_EQ((*node)->wait(), 0) << (*node)->output();
  expect_sum_of_ranks(first->output() + second->output(), 2);
  EXPECT_THAT(first->output(),
              HasSubstr(fmt::format("security: the store at {} lets in whoever reaches it", store.text())));
  if (is_loopback(own_address())) GTEST_SKIP() << "this machine has no network: nobody else can reach the store";
  EXPECT_THAT(first->output(),
              HasSubstr(fmt::format("the store at {} lets in whoever reaches it: set PHALANX_JOB_SECRET, or "
                                    "PHALANX_JOB_SECRET_FILE, to the same on every node",
                                    store.text())));
}

}  // namespace
}  // namespace phalanx
