// Jobs of many nodes: several launchers, on one machine's loopback and in network namespaces that simulate nodes.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/supervisor/coordinator_service.h"
#include "phalanx/launch/testing/launcher_process.h"
#include "phalanx/launch/testing/netns_nodes.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/free_address.h"

namespace phalanx {
namespace {

using Launcher = std::unique_ptr<RunningLauncher>;
using Words = std::vector<std::string>;

const std::string kSecret = "a secret that all nodes of these tests know";

Words together(Words head, const Words& tail) {
  head.insert(head.end(), tail.begin(), tail.end());
  return head;
}

// Simulated nodes on this machine. Their rendezvous is on loopback, at a port that was free a moment ago.
class Nodes {
 public:
  Nodes() : endpoint_(free_address().text()) {}

  Launcher dynamic(const std::string& nodes, int ranks, const Words& rest, const std::string& secret = kSecret) const {
    const auto colon = nodes.find(':');
    return start(ranks,
                 together({"--min-nodes=" + nodes.substr(0, colon),
                           "--max-nodes=" + (colon == std::string::npos ? nodes : nodes.substr(colon + 1))},
                          rest),
                 secret);
  }
  Launcher fixed(int rank, int nodes, int ranks, const Words& rest) const {
    return start(ranks,
                 together({fmt::format("--min-nodes={}", nodes), fmt::format("--max-nodes={}", nodes),
                           fmt::format("--node-rank={}", rank)},
                          rest),
                 kSecret);
  }
  /// All nodes of a job, with one rank each.
  std::vector<Launcher> all_fixed(int nodes, const Words& rest) const {
    std::vector<Launcher> launchers;
    for (int rank = 0; rank < nodes; ++rank) launchers.push_back(fixed(rank, nodes, 1, rest));
    return launchers;
  }
  const std::string& endpoint() const { return endpoint_; }
  /// A client of the rendezvous store, after a node hosts it.
  std::unique_ptr<TcpStore> store() const {
    return std::make_unique<TcpStore>(parse_host_port(endpoint_, "endpoint"), TcpStoreOptions{.secret = kSecret});
  }

 private:
  Launcher start(int ranks, const Words& rest, const std::string& secret) const {
    return std::make_unique<RunningLauncher>(
        ranks, together({"--endpoint=" + endpoint_, "--last-call-ms=200", "--keep-alive-ms=650"}, rest),
        RunningLauncher::Options{.environment = {{"PHALANX_JOB_SECRET", secret}}});
  }
  std::string endpoint_;
};

std::string report_of(const std::vector<Launcher>& launchers) {
  std::string text;
  for (const auto& launcher : launchers) text += launcher->out() + launcher->err() + "---\n";
  return text;
}

Launcher start_on(const NetnsNodes& machines, int machine, int ranks, const Words& words) {
  return std::make_unique<RunningLauncher>(
      ranks,
      together({"--endpoint=" + machines.address(0) + ":29400", "--last-call-ms=300", "--keep-alive-ms=500"}, words),
      RunningLauncher::Options{.before = machines.on(machine), .environment = {{"PHALANX_JOB_SECRET", kSecret}}});
}

Words environment_of_ranks(const TempDirectory& notes) {
  return {test_program(), "environment",      notes.path().string(), "WORLD_SIZE",
          "LOCAL_RANK",   "LOCAL_WORLD_SIZE", "GROUP_RANK",          "GROUP_WORLD_SIZE",
          "ROLE_RANK",    "ROLE_WORLD_SIZE",  "MASTER_ADDR",         "RANK"};
}

TEST(NodesTest, StaticNodesStartInAnyOrderAndRanksAreNumberedThroughThem) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program = environment_of_ranks(notes);
  std::vector<Launcher> launchers;
  launchers.push_back(nodes.fixed(2, 3, 1, program));
  launchers.push_back(nodes.fixed(1, 3, 2, together({"--role=other"}, program)));
  launchers.push_back(nodes.fixed(0, 3, 2, program));
  for (const auto& launcher : launchers) EXPECT_EQ(launcher->wait(), 0) << report_of(launchers);
  const auto expected = [](int local_rank, int local, int node, int role_rank, int role_size, int rank) {
    return fmt::format(
        "WORLD_SIZE=5\nLOCAL_RANK={}\nLOCAL_WORLD_SIZE={}\nGROUP_RANK={}\nGROUP_WORLD_SIZE=3\nROLE_RANK={}\n"
        "ROLE_WORLD_SIZE={}\nMASTER_ADDR=127.0.0.1\nRANK={}\n",
        local_rank, local, node, role_rank, role_size, rank);
  };
  EXPECT_THAT(note_of(notes, "environment.0"), HasSubstr(expected(0, 2, 0, 0, 3, 0)));
  EXPECT_THAT(note_of(notes, "environment.3"), HasSubstr(expected(1, 2, 1, 1, 2, 3)));
  EXPECT_THAT(note_of(notes, "environment.4"), HasSubstr(expected(0, 1, 2, 2, 3, 4)));
}

TEST(NodesTest, OthersReachANodeAtItsLocalAddress) {
  const Nodes nodes;
  TempDirectory notes("notes");
  std::vector<Launcher> launchers;
  for (int node = 0; node < 2; ++node)
    launchers.push_back(nodes.fixed(node, 2, 1,
                                    {node == 0 ? "--local-addr=127.0.0.2" : "--role=default", test_program(),
                                     "environment", notes.path().string(), "MASTER_ADDR", "PHALANX_STORE"}));
  for (const auto& launcher : launchers) EXPECT_EQ(launcher->wait(), 0) << report_of(launchers);
  EXPECT_THAT(note_of(notes, "environment.1"),
              AllOf(HasSubstr("MASTER_ADDR=127.0.0.2\n"), HasSubstr("PHALANX_STORE=127.0.0.2:")));
}

TEST(NodesTest, WithoutASecretTheHostWarns) {
  const std::string warning = "no secret is set, so whoever reaches the rendezvous can join the job";
  for (const std::string& secret : {std::string(), kSecret}) {
    const Nodes nodes;
    Launcher host = nodes.dynamic("1:2", 1, {test_program(), "print"}, secret);
    EXPECT_EQ(host->wait(), 0) << host->err();
    EXPECT_EQ(host->err().find(warning) != std::string::npos, secret.empty()) << host->err();
  }
}

TEST(NodesTest, DynamicNodesDecideWhoHosts) {
  const Nodes nodes;
  TempDirectory notes("notes");
  std::vector<Launcher> launchers;
  for (int i = 0; i < 2; ++i) launchers.push_back(nodes.dynamic("2:3", 1, environment_of_ranks(notes)));
  for (const auto& launcher : launchers) EXPECT_EQ(launcher->wait(), 0) << report_of(launchers);
  EXPECT_THAT(note_of(notes, "environment.1"), HasSubstr("WORLD_SIZE=2\n"));
  EXPECT_THAT(report_of(launchers), HasSubstr("this node hosts the rendezvous of 2 to 3 nodes at " + nodes.endpoint()));
}

TEST(NodesTest, AFailureOnOneNodeRestartsTheRanksOfAll) {
  const Nodes nodes;
  TempDirectory notes("notes");
  std::vector<Launcher> launchers;
  const Words program{"--max-restarts=2", test_program(), "fail-once", notes.path().string(), "3", "9"};
  for (int node = 0; node < 2; ++node) launchers.push_back(nodes.fixed(node, 2, 2, program));
  for (const auto& launcher : launchers) EXPECT_EQ(launcher->wait(), 0) << report_of(launchers);
  for (int rank = 0; rank < 4; ++rank) noted_pid(notes, fmt::format("attempt.1.{}", rank));
  EXPECT_THAT(launchers[0]->err(), AllOf(HasSubstr("rank 3 (host "), HasSubstr("ended with exit status 9"),
                                         HasSubstr("all ranks restart (restart 1 of 2)")));
}

TEST(NodesTest, TheRootCauseIsToldOnEveryNodeAndTheReportOnTheHost) {
  const Nodes nodes;
  std::vector<Launcher> launchers = nodes.all_fixed(2, {test_program(), "throw", "1"});
  for (const auto& launcher : launchers) {
    EXPECT_EQ(launcher->wait(), 2);
    EXPECT_THAT(launcher->err(), AllOf(HasSubstr("launcher: rank 1 (host "), HasSubstr("): [training] steps is -1\n")));
  }
  EXPECT_THAT(launchers[0]->err(), AllOf(HasSubstr("other failures:\n"), HasSubstr("rank 0 lost its peer")));
  EXPECT_THAT(launchers[1]->err(), Not(HasSubstr("other failures")));
}

TEST(NodesTest, ALateNodeJoinsAndCostsNoRestart) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program{test_program(), "hold", notes.path().string()};
  std::vector<Launcher> launchers;
  launchers.push_back(nodes.dynamic("1:2", 1, program));
  noted_pid(notes, "hold.0.of.1");
  launchers.push_back(nodes.dynamic("1:2", 2, program));
  for (int rank = 0; rank < 3; ++rank) noted_pid(notes, fmt::format("hold.{}.of.3", rank));
  write_note(notes, "go");
  for (const auto& launcher : launchers) EXPECT_EQ(launcher->wait(), 0) << report_of(launchers);
  EXPECT_THAT(launchers[0]->err(), HasSubstr("has come: all ranks restart"));
}

TEST(NodesTest, WhenANodeIsKilledTheOthersGoOnWithoutIt) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program{"--max-restarts=1", test_program(), "hold", notes.path().string()};
  std::vector<Launcher> launchers;
  for (int node = 0; node < 3; ++node) {
    launchers.push_back(nodes.dynamic("2:3", 1, program));
    if (node == 0) {
      EXPECT_TRUE(comes_true([&] { return launchers[0]->err().find("hosts") != std::string::npos; }));
    }
  }
  for (int rank = 0; rank < 3; ++rank) noted_pid(notes, fmt::format("hold.{}.of.3", rank));
  // There may have been a round of two nodes before the third joined.
  for (int rank = 0; rank < 2; ++rank) std::filesystem::remove(notes.path() / fmt::format("hold.{}.of.2", rank));
  launchers[2]->send(SIGKILL);
  EXPECT_EQ(launchers[2]->wait(), 128 + SIGKILL);
  for (int rank = 0; rank < 2; ++rank) noted_pid(notes, fmt::format("hold.{}.of.2", rank));
  write_note(notes, "go");
  for (int node = 0; node < 2; ++node)
    EXPECT_EQ(launchers[static_cast<std::size_t>(node)]->wait(), 0) << report_of(launchers);
  EXPECT_THAT(launchers[0]->err(), AllOf(HasSubstr(" was lost: its launcher has ended"), HasSubstr("restart 1 of 1")));
}

TEST(NodesTest, AStoppedNodeIsLostAfterItsKeepAlivesAndToldSoWhenItComesBack) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program{test_program(), "hold", notes.path().string()};
  std::vector<Launcher> launchers = nodes.all_fixed(2, program);
  for (int rank = 0; rank < 2; ++rank) noted_pid(notes, fmt::format("hold.{}.of.2", rank));
  launchers[1]->send(SIGSTOP);
  EXPECT_EQ(launchers[0]->wait(), 1);
  EXPECT_THAT(launchers[0]->err(),
              AllOf(HasSubstr("launcher: the node "), HasSubstr(" with rank 1 was lost: no sign of life for ")));
  launchers[1]->send(SIGCONT);
  EXPECT_EQ(launchers[1]->wait(), 1);
}

TEST(NodesTest, WhenTheHostIsKilledTheOthersEndAndNothingIsLeft) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program{test_program(), "hold", notes.path().string()};
  std::vector<Launcher> launchers = nodes.all_fixed(2, program);
  const pid_t rank = noted_pid(notes, "hold.1.of.2"), other = noted_pid(notes, "hold.0.of.2");
  launchers[0]->send(SIGKILL);
  EXPECT_EQ(launchers[0]->wait(), 128 + SIGKILL);
  EXPECT_EQ(launchers[1]->wait(), 1);
  EXPECT_THAT(
      launchers[1]->err(),
      HasSubstr(fmt::format("the node that hosts the rendezvous at {} cannot be reached any more", nodes.endpoint())));
  for (const pid_t pid : {rank, other}) EXPECT_TRUE(comes_true([&] { return is_gone(pid); })) << pid;
}

TEST(NodesTest, CtrlCOnOneNodeEndsAllInPeace) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const auto launchers = nodes.all_fixed(2, {test_program(), "graceful", notes.path().string()});
  for (int rank = 0; rank < 2; ++rank) noted_pid(notes, fmt::format("pid.{}", rank));
  launchers[1]->send(SIGINT);
  for (const auto& launcher : launchers) EXPECT_EQ(launcher->wait(), 0) << report_of(launchers);
  for (int rank = 0; rank < 2; ++rank) noted_pid(notes, fmt::format("saved.{}", rank));
}

// As a batch system or srun sends it. The ranks get it a moment earlier through the host's order.
TEST(NodesTest, ASignalToEveryNodeIsOneWishToStop) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const auto launchers = nodes.all_fixed(2, {test_program(), "graceful", notes.path().string()});
  for (int rank = 0; rank < 2; ++rank) noted_pid(notes, fmt::format("pid.{}", rank));
  launchers[1]->send(SIGTERM);
  EXPECT_EQ(note_of(notes, "asked.0"), std::to_string(SIGTERM));
  launchers[0]->send(SIGTERM);
  for (const auto& launcher : launchers) EXPECT_EQ(launcher->wait(), 0) << report_of(launchers);
  for (const char* rank : {"saved.0", "saved.1"}) EXPECT_EQ(note_of(notes, rank), "");  // and received the signal once
}

TEST(NodesTest, ASignalToANodeWhoseRanksHaveStoppedByOrderChangesNothing) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const auto launchers = nodes.all_fixed(2, {test_program(), "graceful", notes.path().string()});
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(noted_pid(notes, fmt::format("pid.{}", rank)));
  launchers[1]->send(SIGTERM);
  note_of(notes, "asked.1");
  kill(ranks[1], SIGSTOP);  // so that it ends after the other
  EXPECT_TRUE(comes_true([&] { return is_gone(ranks[0]); }));
  launchers[0]->send(SIGTERM);
  kill(ranks[1], SIGCONT);
  for (const auto& launcher : launchers) EXPECT_EQ(launcher->wait(), 0) << report_of(launchers);
}

TEST(NodesTest, AfterAnOrderToStopTheUsersSecondSignalKillsAtOnce) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const auto launchers = nodes.all_fixed(2, {test_program(), "graceful", notes.path().string()});
  for (int rank = 0; rank < 2; ++rank) noted_pid(notes, fmt::format("pid.{}", rank));
  launchers[1]->send(SIGTERM);
  note_of(notes, "asked.0");
  for (const int signal : {SIGTERM, SIGINT}) launchers[0]->send(signal);
  EXPECT_GE(launchers[0]->wait(), 128) << report_of(launchers);
  EXPECT_FALSE(std::filesystem::exists(notes.path() / "saved.0"));
}

TEST(NodesTest, ANodeThatIsToldToStopWhileARoundBeginsStartsNoRanks) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program{"--keep-alive-ms=20000", test_program(), "graceful", notes.path().string()};
  std::vector<Launcher> launchers;
  for (int node = 0; node < 2; ++node) launchers.push_back(nodes.fixed(node, 3, 1, program));
  const auto store = nodes.store();
  EXPECT_TRUE(comes_true([&] { return store->try_get(rendezvous_keys::kMembers) == "2"; }));
  launchers[1]->send(SIGSTOP);  // it has joined, and reads the start order after the signal
  launchers.push_back(nodes.fixed(2, 3, 1, program));
  for (const char* rank : {"pid.0", "pid.2"}) noted_pid(notes, rank);
  for (const int signal : {SIGTERM, SIGCONT}) launchers[1]->send(signal);
  for (const auto& launcher : launchers) {
    EXPECT_TRUE(comes_true([&] { return is_gone(launcher->pid()); })) << report_of(launchers);
    launcher->send(SIGKILL);  // a launcher that has ended does not notice
    EXPECT_EQ(launcher->wait(), 128 + SIGTERM) << report_of(launchers);
  }
  EXPECT_FALSE(std::filesystem::exists(notes.path() / "pid.1"));
}

TEST(NodesTest, ANodeThatIsToldToLeaveLeavesASmallerWorld) {
  // Ranks that the signal ends, and ranks that end with 0: the other nodes notice when the node has left.
  for (const std::string mode : {"hold", "depart"}) {
    const Nodes nodes;
    TempDirectory notes("notes");
    const Words program{test_program(), mode, notes.path().string()};
    Launcher host = nodes.dynamic("1:2", 1, program);
    EXPECT_TRUE(comes_true([&] { return host->err().find("hosts the rendezvous") != std::string::npos; }));
    Launcher second = nodes.dynamic("1:2", 1, program);
    for (const char* rank : {"0", "1"}) noted_pid(notes, fmt::format("{}.{}.of.2", mode, rank));
    std::filesystem::remove(notes.path() / (mode + ".0.of.1"));  // there may have been such a round before
    second->send(SIGTERM);
    EXPECT_EQ(second->wait(), mode == "hold" ? 128 + SIGTERM : 0) << second->err();
    write_note(notes, "lost");
    noted_pid(notes, mode + ".0.of.1");
    write_note(notes, "go");
    EXPECT_EQ(host->wait(), 0) << host->err();
    EXPECT_THAT(host->err(), ContainsRegex(mode == "hold" ? "the node .* has left: all ranks restart"
                                                          : "the node .* leaves, and rank 0 .*: all ranks restart"));
  }
}

TEST(NodesTest, ANodeThatWaitsMayGoOrStepsInForALostOne) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program{"--max-restarts=1", test_program(), "hold", notes.path().string()};
  const auto start_a_spare = [&] {
    Launcher spare = nodes.dynamic("2", 1, program);
    const std::string waits = "this node waits: the job has its 2 nodes";
    EXPECT_TRUE(comes_true([&] { return spare->err().find(waits) != std::string::npos; })) << spare->err();
    return spare;
  };
  Launcher host = nodes.dynamic("2", 1, program);
  EXPECT_TRUE(comes_true([&] { return host->err().find("hosts the rendezvous") != std::string::npos; }));
  Launcher second = nodes.dynamic("2", 1, program);
  const Words ranks{"hold.0.of.2", "hold.1.of.2"};
  for (const std::string& rank : ranks) noted_pid(notes, rank);
  Launcher leaver = start_a_spare();
  leaver->send(SIGTERM);
  EXPECT_EQ(leaver->wait(), 128 + SIGTERM);
  Launcher spare = start_a_spare();
  for (const std::string& rank : ranks) EXPECT_TRUE(std::filesystem::remove(notes.path() / rank));
  second->send(SIGKILL);
  EXPECT_EQ(second->wait(), 128 + SIGKILL);
  for (const std::string& rank : ranks) noted_pid(notes, rank);
  write_note(notes, "go");
  EXPECT_EQ(host->wait(), 0) << host->err();
  EXPECT_EQ(spare->wait(), 0) << spare->err();
  EXPECT_THAT(host->err(), AllOf(HasSubstr(" was lost: its launcher has ended"), HasSubstr("restart 1 of 1")));
}

TEST(NodesTest, ARendezvousThatBreaksDownEndsTheJobOnEveryNodeWithTheReason) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program{test_program(), "graceful", notes.path().string()};
  std::vector<Launcher> launchers;
  launchers.push_back(nodes.fixed(0, 2, 1, program));
  const auto store = nodes.store();
  EXPECT_TRUE(comes_true([&] { return store->try_get(rendezvous_keys::kMembers) == "1"; }));
  launchers.push_back(nodes.fixed(1, 2, 1, program));
  for (int rank = 0; rank < 2; ++rank) noted_pid(notes, fmt::format("pid.{}", rank));
  store->set(rendezvous_keys::message(1, 1), "what no node says");
  for (const auto& launcher : launchers) {
    EXPECT_TRUE(comes_true([&] { return is_gone(launcher->pid()); }));
    launcher->send(SIGKILL);  // a launcher that has ended does not notice
    EXPECT_EQ(launcher->wait(), 1);
    EXPECT_THAT(launcher->err(), HasSubstr("launcher: the rendezvous at " + nodes.endpoint() + " has broken down: "));
  }
  // The ranks got as much time to end as after a failure.
  for (const char* rank : {"saved.0", "saved.1"}) EXPECT_TRUE(std::filesystem::exists(notes.path() / rank)) << rank;
}

TEST(NodesTest, ASignalWhileWaitingForTheOthersEndsAtOnce) {
  const Nodes nodes;
  Launcher host = nodes.fixed(0, 2, 1, {test_program(), "print"});
  EXPECT_TRUE(comes_true([&] { return host->err().find("hosts the rendezvous") != std::string::npos; }));
  host->send(SIGTERM);
  EXPECT_EQ(host->wait(), 128 + SIGTERM);
  const Nodes elsewhere;
  Launcher client = elsewhere.fixed(1, 2, 1, {test_program(), "print"});
  EXPECT_TRUE(comes_true([&] { return client->err().find("waiting for the node that hosts") != std::string::npos; }));
  client->send(SIGTERM);
  EXPECT_TRUE(comes_true([&] { return is_gone(client->pid()); }));  // it would wait for 600 s
  client->send(SIGKILL);                                            // a launcher that has ended does not notice
  EXPECT_EQ(client->wait(), 128 + SIGTERM);
  EXPECT_THAT(client->err(), Not(HasSubstr("launcher: ")));
}

TEST(NodesTest, WhoDoesNotComeIsNamedWithTheAddress) {
  const Nodes nodes;
  // The second node joins before the host's join timeout ends.
  Launcher second = nodes.fixed(2, 3, 1, {"--join-ms=20000", test_program(), "print"});
  EXPECT_TRUE(comes_true([&] { return second->err().find("waiting for the node that hosts") != std::string::npos; }));
  Launcher host = nodes.fixed(0, 3, 1, {"--join-ms=2000", test_program(), "print"});
  for (const Launcher* launcher : {&host, &second}) {
    EXPECT_EQ((*launcher)->wait(), 1);
    EXPECT_THAT((*launcher)->err(),
                AllOf(HasSubstr("rendezvous at " + nodes.endpoint()),
                      HasSubstr("of 3 nodes these have not come: node ranks 1 (those that came: 0 on ")));
  }
  const Nodes nobody;
  Launcher alone = nobody.fixed(1, 2, 1, {"--join-ms=300", test_program(), "print"});
  EXPECT_EQ(alone->wait(), 1);
  EXPECT_THAT(
      alone->err(),
      HasSubstr(fmt::format("the node that hosts the rendezvous at {} has not come within 0.3 s: connection refused",
                            nobody.endpoint())));
}

TEST(NodesTest, NodesThatContradictEachOtherAreRefusedByName) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program{test_program(), "hold", notes.path().string()};
  Launcher host = nodes.fixed(0, 2, 1, program);
  EXPECT_TRUE(comes_true([&] { return host->err().find("hosts the rendezvous") != std::string::npos; }));
  Launcher wrong_size = nodes.fixed(1, 3, 1, program);
  EXPECT_EQ(wrong_size->wait(), 1);
  EXPECT_THAT(wrong_size->err(),
              HasSubstr("this node was started with --nnodes 3 and the host of " + nodes.endpoint() + " with 2"));
  Launcher second_host = nodes.fixed(0, 2, 1, program);
  EXPECT_EQ(second_host->wait(), 1);
  EXPECT_THAT(second_host->err(), HasSubstr("the port is in use by another program"));
  Launcher good = nodes.fixed(1, 2, 1, program);
  noted_pid(notes, "hold.1.of.2");
  Launcher twice = nodes.fixed(1, 2, 1, program);
  EXPECT_EQ(twice->wait(), 1);
  EXPECT_THAT(twice->err(), HasSubstr("--node-rank 1 was given twice"));
  write_note(notes, "go");
  EXPECT_EQ(host->wait(), 0);
  EXPECT_EQ(good->wait(), 0);
}

TEST(NodesTest, AStrangerWithAnotherSecretIsRefused) {
  const Nodes nodes;
  TempDirectory notes("notes");
  const Words program{test_program(), "hold", notes.path().string()};
  Launcher host = nodes.dynamic("1:2", 1, program);
  noted_pid(notes, "hold.0.of.1");
  Launcher stranger = nodes.dynamic("1:2", 1, program, "another secret altogether");
  EXPECT_EQ(stranger->wait(), 2);
  EXPECT_THAT(stranger->err(), HasSubstr("secret"));
  EXPECT_TRUE(comes_true([&] { return host->err().find("refused 127.0.0.1") != std::string::npos; })) << host->err();
  write_note(notes, "go");
  EXPECT_EQ(host->wait(), 0);
}

TEST(NodesTest, EndpointsThatCannotWorkAreOneErrorEach) {
  const auto error_of = [](const Words& words) {
    RunningLauncher launcher(
        1, together(words, {"--min-nodes=2", "--max-nodes=2", "--join-ms=500", test_program(), "print"}));
    EXPECT_EQ(launcher.wait(), 1);
    return launcher.err();
  };
  EXPECT_THAT(error_of({"--endpoint=no-such-host.invalid:4000"}),
              HasSubstr("the host name 'no-such-host.invalid' does not resolve"));
  EXPECT_THAT(error_of({"--endpoint=192.0.2.1:4000", "--node-rank=0"}),
              AllOf(HasSubstr("'192.0.2.1' is not an address of this node"), HasSubstr("is --node-rank right?")));
  // The port belongs to a program that is not a Phalanx store. It does not answer, and the launcher must not wait
  // forever.
  const UniqueFd listener = listen_on({"127.0.0.1", 0});
  const std::string endpoint = fmt::format("--endpoint=127.0.0.1:{}", local_port(listener.get()));
  EXPECT_THAT(error_of({endpoint, "--node-rank=0"}), HasSubstr("the port is in use by another program"));
}

TEST(NetnsNodesTest, NodesMeetAcrossANetworkInAnyOrder) {
  const NetnsNodes machines(2);
  SKIP_WITHOUT(machines);
  TempDirectory notes("notes");
  std::vector<Launcher> launchers;
  // The host is the node that has the endpoint's address, although it starts last.
  for (const int machine : {1, 0})
    launchers.push_back(
        start_on(machines, machine, 1, together({"--min-nodes=2", "--max-nodes=2"}, environment_of_ranks(notes))));
  for (const auto& launcher : launchers) EXPECT_EQ(launcher->wait(), 0) << report_of(launchers);
  EXPECT_THAT(note_of(notes, "environment.1"), HasSubstr("MASTER_ADDR=" + machines.address(0)));
  EXPECT_THAT(launchers[1]->err(), HasSubstr("hosts the rendezvous"));
}

TEST(NetnsNodesTest, SocketsAreBoundToTheEndpointsInterface) {
  const NetnsNodes machines(1);
  SKIP_WITHOUT(machines);
  TempDirectory notes("notes");
  Launcher launcher =
      start_on(machines, 0, 1, {"--min-nodes=1", "--max-nodes=2", test_program(), "hold", notes.path().string()});
  noted_pid(notes, "hold.0.of.1");
  const std::string table = machines.listeners(0);                  // addresses in hexadecimal, state 0A: listening
  EXPECT_THAT(table, HasSubstr("0107D50A:72D8 00000000:0000 0A"));  // 10.213.7.1:29400
  EXPECT_THAT(table, Not(HasSubstr(" 00000000:72D8")));
  EXPECT_THAT(table, Not(ContainsRegex(": 00000000:[0-9A-F]+ 00000000:0000 0A")));
  write_note(notes, "go");
  EXPECT_EQ(launcher->wait(), 0) << launcher->err();
}

TEST(NetnsNodesTest, ALinkThatGoesDownIsALostNode) {
  const NetnsNodes machines(3);
  SKIP_WITHOUT(machines);
  TempDirectory notes("notes");
  const Words words{"--min-nodes=2", "--max-nodes=3", "--max-restarts=1",
                    test_program(),  "hold",          notes.path().string()};
  std::vector<Launcher> launchers;
  for (int machine = 0; machine < 3; ++machine) launchers.push_back(start_on(machines, machine, 1, words));
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(noted_pid(notes, fmt::format("hold.{}.of.3", rank)));
  for (int rank = 0; rank < 2; ++rank) std::filesystem::remove(notes.path() / fmt::format("hold.{}.of.2", rank));
  machines.cut(2);
  const auto cut_at = std::chrono::steady_clock::now();
  for (int rank = 0; rank < 2; ++rank) noted_pid(notes, fmt::format("hold.{}.of.2", rank));
  EXPECT_EQ(launchers[2]->wait(), 1);  // it only knows that the host is gone
  // Three heartbeats are 1.5 s, and a request to the host times out after as long. TCP itself takes minutes.
  EXPECT_LT(std::chrono::steady_clock::now() - cut_at, std::chrono::seconds(20));
  EXPECT_THAT(launchers[2]->err(),
              HasSubstr("the node that hosts the rendezvous at 10.213.7.1:29400 cannot be reached any more"));
  EXPECT_TRUE(
      comes_true([&] { return std::all_of(ranks.begin(), ranks.end(), [](pid_t pid) { return is_gone(pid); }); }));
  write_note(notes, "go");
  for (int node = 0; node < 2; ++node)
    EXPECT_EQ(launchers[static_cast<std::size_t>(node)]->wait(), 0) << report_of(launchers);
  EXPECT_THAT(launchers[0]->err(), AllOf(HasSubstr(" was lost: "), HasSubstr("restart 1 of 1")));
}

}  // namespace
}  // namespace phalanx
