// The sockets of ranks that sum over gloo: where they listen, and which errors the ranks report when the link between
// them goes down.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/launch/testing/launcher_process.h"
#include "phalanx/launch/testing/listeners.h"
#include "phalanx/launch/testing/netns_nodes.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/free_address.h"

namespace phalanx {
namespace {

const std::string kLoopback = "0100007F", kLoopback6 = "00000000000000000000000001000000";

TEST(RankSockets, AJobOfOneNodeListensOnLoopbackOnly) {
  TempDirectory notes("notes");
  RunningLauncher launcher(
      2, {built_program("launch_test_worker"), "--backend", "gloo", "--notes", notes.path().string()});
  std::vector<pid_t> processes{launcher.pid()};
  for (int rank = 0; rank < 2; ++rank) processes.push_back(noted_pid(notes, fmt::format("sum.{}", rank)));
  for (const pid_t process : processes) {
    const auto addresses = listening_addresses(process);
    // The launcher has the store's socket. The ranks are connected, and listen no more.
    EXPECT_EQ(addresses.empty(), process != launcher.pid()) << process;
    EXPECT_THAT(addresses, Each(AnyOf(kLoopback, kLoopback6)));
  }
  write_note(notes, "go");
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
}

// Two ranks started by hand. The second one gets an address that surely reaches the first.
class MasterSocket : public testing::Test {
 protected:
  // Both run until FOLDER/go exists.
  void start(const std::string& master, const EnvironmentMap& more = {}, const std::vector<std::string>& before = {}) {
    const std::uint16_t free = free_address().port;
    for (int rank = 0; rank < 2; ++rank) {
      auto environment = clean_environment();
      environment["RANK"] = std::to_string(rank);
      environment["WORLD_SIZE"] = "2";
      environment["MASTER_ADDR"] = rank == 0 ? master : "127.0.0.1";
      environment["MASTER_PORT"] = std::to_string(free);
      if (rank == 0)
        for (const auto& [name, value] : more) environment[name] = value;
      std::vector<std::string> command = rank == 0 ? before : std::vector<std::string>{};
      command.insert(command.end(), {worker(), "--notes", notes_.path().string(), "--timeout-ms", "60000"});
      ranks_.push_back(std::make_unique<CollectedProcess>(command, environment));
    }
  }
  // Returns the addresses that rank 0 listens on (only the store); then both ranks end.
  std::vector<std::string> listens_on() const {
    EXPECT_TRUE(
        comes_true([&] { return std::filesystem::exists(notes_.path() / "sum.0") || is_gone(ranks_[0]->pid()); }));
    std::ifstream file(notes_.path() / "sum.0");
    pid_t process = ranks_[0]->pid();
    file >> process;
    const auto addresses = listening_addresses(process);
    write_note(notes_, "go");
    for (const auto& rank : ranks_) EXPECT_EQ(rank->wait(), 0) << rank->output();
    return addresses;
  }
  std::string said() const { return ranks_[0]->output(); }

  TempDirectory notes_{"notes"};
  std::vector<std::unique_ptr<CollectedProcess>> ranks_;
};

constexpr const char* kNotOurs = "198.51.100.7";  // of a network for documentation
const auto is_every_interface = AnyOf("00000000", "00000000000000000000000000000000");

TEST_F(MasterSocket, ThatIsOfNoInterfaceHereListensOnAllAndSaysSo) {
  start(kNotOurs);
  EXPECT_THAT(listens_on(), ElementsAre(is_every_interface));
  EXPECT_THAT(said(), HasSubstr("198.51.100.7 is not an address of this node: the store listens on every interface. "
                                "PHALANX_SOCKET_IFNAME names one"));
}

TEST_F(MasterSocket, ListensOnTheInterfaceThatIsNamed) {
  start(kNotOurs, {{"PHALANX_SOCKET_IFNAME", "lo"}});
  EXPECT_THAT(listens_on(), ElementsAre(kLoopback));
  EXPECT_THAT(said(), Not(HasSubstr("every interface")));
}

TEST_F(MasterSocket, OnAnInterfaceThatIsNotThereIsAnError) {
  start("127.0.0.1", {{"PHALANX_SOCKET_IFNAME", "nosuch0"}});
  EXPECT_EQ(ranks_[0]->wait(), 2);
  EXPECT_THAT(said(),
              HasSubstr("PHALANX_SOCKET_IFNAME is 'nosuch0': no interface of this node that is up has this name"));
}

// On Debian a host's own name resolves to 127.0.1.1, which other nodes cannot reach.
TEST_F(MasterSocket, OfANameThatIsLoopbackToItsOwnMachineListensOnAllAndSaysSo) {
  const std::string hosts = (notes_.path() / "hosts").string();
  std::ofstream(hosts) << "127.0.0.1 localhost\n127.0.1.1 debians-own\n";
  const std::vector<std::string> with_hosts{
      "unshare", "--mount", "sh", "-c", "mount --bind \"$0\" /etc/hosts || exit 77; exec \"$@\"", hosts};
  auto probe = with_hosts;
  probe.emplace_back("true");
  if (CollectedProcess allowed(probe); allowed.wait() != 0)
    GTEST_SKIP() << "a process cannot be given its own /etc/hosts here: " << allowed.output();
  start("debians-own", {}, with_hosts);
  EXPECT_THAT(listens_on(), ElementsAre(is_every_interface));
  EXPECT_THAT(said(), HasSubstr("debians-own is loopback to this node itself: the store listens on every interface"));
}

TEST(RankSockets, GloosInterfaceMayBeNamedAsForTorch) {
  const std::vector<std::string> command{
      built_program("launch_test_program"), "supervise", "2", worker(), "--backend", "gloo"};
  auto environment = clean_environment();
  environment["GLOO_SOCKET_IFNAME"] = "nosuch0,lo";
  CollectedProcess wrong(command, environment);
  EXPECT_EQ(wrong.wait(), 2);
  EXPECT_THAT(wrong.output(), HasSubstr("GLOO_SOCKET_IFNAME is 'nosuch0': no interface of this node that is up"));
  environment["GLOO_SOCKET_IFNAME"] = "lo,nosuch0";
  CollectedProcess right(command, environment);
  EXPECT_EQ(right.wait(), 0) << right.output();
  expect_sum_of_ranks(right.output(), 2);
}

// Both paths of the data: gloo only, and shared memory intra-node with gloo inter-node. Also nodes with separate
// networks that see each other's processes, as containers may.
struct Apart {
  const char* name;
  int ranks;       // per node
  bool processes;  // separate PID namespaces too
};
class RankLinks : public testing::TestWithParam<Apart> {};
INSTANTIATE_TEST_SUITE_P(NetnsNodes, RankLinks,
                         testing::Values(Apart{"Gloo", 1, true}, Apart{"ShmAndGloo", 2, true},
                                         Apart{"ProcessesInSight", 1, false}),
                         [](const auto& info) { return info.param.name; });

TEST_P(RankLinks, ThatGoDownAreAnErrorOnEveryRankWithinTheHeartbeatLimit) {
  const int ranks = GetParam().ranks;
  const NetnsNodes machines(2);
  SKIP_WITHOUT(machines);
  TempDirectory notes("notes");
  std::vector<std::unique_ptr<RunningLauncher>> nodes;
  for (int node = 0; node < 2; ++node) {
    auto before = machines.on(node);
    if (GetParam().processes)
      for (const char* word : {"unshare", "--pid", "--fork", "--kill-child", "--mount-proc"}) before.emplace_back(word);
    nodes.push_back(std::make_unique<RunningLauncher>(
        ranks,
        // The launchers must notice later than the ranks.
        std::vector<std::string>{"--endpoint=" + machines.address(0) + ":29400", "--min-nodes=2", "--max-nodes=2",
                                 fmt::format("--node-rank={}", node), "--keep-alive-ms=20000",
                                 built_program("launch_test_worker"), "--notes", notes.path().string()},
        RunningLauncher::Options{.before = before,
                                 .environment = {{"PHALANX_JOB_SECRET", "a secret that both nodes know"},
                                                 {"PHALANX_COMM_HEARTBEAT_SECONDS", "2"},
                                                 {"OMP_NUM_THREADS", "1"}}}));
  }
  for (int rank = 0; rank < 2 * ranks; ++rank) note_of(notes, fmt::format("sum.{}", rank));
  machines.cut(1);
  const auto cut_at = std::chrono::steady_clock::now();
  for (int rank = 0; rank < 2 * ranks; ++rank)
    EXPECT_THAT(note_of(notes, fmt::format("error.{}", rank)),
                AllOf(HasSubstr("all_reduce(float32["),
                      AnyOf(HasSubstr(" has given no sign of life for "),
                            HasSubstr(" cannot be heard of: the store has not answered this rank for "))))
        << nodes[0]->err() << nodes[1]->err();
  // The timeout of the operation is 100 s and more. A busy machine may add some delay.
  EXPECT_LT(std::chrono::steady_clock::now() - cut_at, std::chrono::seconds(10));
  EXPECT_THAT(nodes[0]->err(), HasSubstr(ranks == 1 ? "backend: gloo" : "backend: shm+gloo"));
}

}  // namespace
}  // namespace phalanx
