// The same program under a real torchrun: one launcher on one node, and two that simulate two nodes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/agent_store.h"
#include "phalanx/launch/rendezvous/own_address.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/launch/testing/launcher_process.h"
#include "phalanx/store/job_secret.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/free_address.h"

namespace phalanx {
namespace {

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

  // Starts one of two simulated nodes on loopback, with one rank each.
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
  // What torchrun's store, which admits everyone, contains about our store.
  std::string passed_on() const {
    for (int rank = 0; rank < 2; ++rank) noted_pid(notes_, fmt::format("sum.{}", rank));
    return exchange_through_agent_store(agent_, "phalanx/job9/store", nullptr, std::chrono::seconds(20));
  }

  std::string program_;
  const HostPort agent_ = free_address();
  TempDirectory notes_{"notes"};
};

TEST_F(Torchrun, StartsEveryRank) {
  CollectedProcess process({program_, "--standalone", "--nproc-per-node", "2", "--no-python", worker()});
  EXPECT_EQ(process.wait(), 0) << process.output();
  expect_sum_of_ranks(process.output(), 2);
  EXPECT_THAT(process.output(),
              AllOf(HasSubstr("rank 0 of 2, from torchrun (run "), HasSubstr("rank 1 of 2, local 1 of 2, shm on "),
                    // On one node a private file carries a secret, although the user set none.
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

// Two nodes with torchrun's c10d rendezvous. Only the agent of the killed rank counts the restart, since the other's
// rank has not failed.
TEST_F(Torchrun, RanksOnTwoNodesMeetAgainAfterOneWasKilled) {
  std::vector<std::unique_ptr<CollectedProcess>> nodes;
  for (int node = 0; node < 2; ++node) {
    std::istringstream words(
        fmt::format("{} --nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d --rdzv-endpoint {} "
                    "--rdzv-id job9 --rdzv-conf is_host={} --no-python {} --killed-once 1 --patient true "
                    "--timeout-ms 60000",
                    program_, agent_.text(), node == 0 ? 1 : 0, worker()));
    nodes.push_back(
        std::make_unique<CollectedProcess>(std::vector<std::string>{std::istream_iterator<std::string>(words), {}}));
  }
  std::string said;
  for (const auto& node : nodes) {
    EXPECT_EQ(node->wait(), 0) << node->output();
    said += node->output();
  }
  EXPECT_EQ(times_in(said, ", sum 3\n"), 2) << said;
  EXPECT_THAT(said, HasSubstr("(exitcode: -9)"));
}

// The test plays torchrun: its store, and the variables of ranks on two nodes.
class AgentStore : public testing::Test {
 protected:
  AgentStore() {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  HostPort address() const { return {"127.0.0.1", store_->getPort()}; }
  std::unique_ptr<CollectedProcess> start(int rank, int restarts, const std::string& timeout_ms = "60000") const {
    auto environment = clean_environment();
    for (const auto& [name, value] : EnvironmentMap{{"RANK", std::to_string(rank)},
                                                    {"WORLD_SIZE", "2"},
                                                    {"LOCAL_RANK", "0"},
                                                    {"LOCAL_WORLD_SIZE", "1"},
                                                    {"GROUP_RANK", std::to_string(rank)},
                                                    {"GROUP_WORLD_SIZE", "2"},
                                                    {"MASTER_ADDR", "127.0.0.1"},
                                                    {"MASTER_PORT", std::to_string(address().port)},
                                                    {"TORCHELASTIC_RUN_ID", "job9"},
                                                    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                    {"TORCHELASTIC_RESTART_COUNT", std::to_string(restarts)}})
      environment[name] = value;
    return std::make_unique<CollectedProcess>(std::vector<std::string>{worker(), "--timeout-ms", timeout_ms},
                                              environment);
  }

  c10::intrusive_ptr<c10d::TCPStore> store_;
};

TEST_F(AgentStore, RankZeroThatDoesNotComeIsNamed) {
  const auto rank = start(1, 0, "500");
  EXPECT_EQ(rank->wait(), 1);
  EXPECT_THAT(rank->output(), HasSubstr(fmt::format("rank 0 has not come within 0.5 s: it is to say where its store "
                                                    "is, by the key 'phalanx/job9/store' of torchrun's store at {}",
                                                    address().text())));
}

TEST_F(AgentStore, ARankZeroThatIsNotThereAnyMoreIsNamedWithWhereItWas) {
  const std::string gone = free_address().text();
  store_->set("phalanx/job9/store", std::vector<std::uint8_t>(gone.begin(), gone.end()));
  const auto rank = start(1, 0, "1000");
  EXPECT_EQ(rank->wait(), 1);
  EXPECT_THAT(rank->output(), AllOf(HasSubstr("rank 0 was not reached within 1 s where torchrun's store at " +
                                              address().text() + " says, " + gone),
                                    HasSubstr("nothing listens")));
}

// Nodes count restarts differently, and the store still has the address of the last attempt.
TEST_F(AgentStore, RanksMeetAfterARestartThatOneNodeDoesNotCount) {
  const std::string gone = free_address().text(), key = "phalanx/job9/store";
  store_->set(key, std::vector<std::uint8_t>(gone.begin(), gone.end()));
  const auto early = start(1, 0);
  const auto late = start(0, 1);
  for (const auto* rank : {&early, &late}) EXPECT_EQ((*rank)->wait(), 0) << (*rank)->output();
  expect_sum_of_ranks(early->output() + late->output(), 2);
}

}  // namespace
}  // namespace phalanx
