// init_from_environment() under every launcher, with real processes.
#include "phalanx/launch/process_context.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/under_sanitizer.h"
#include "phalanx/base/version.h"
#include "phalanx/comm/hierarchical/node_discovery.h"
#include "phalanx/comm/liveness/process_probe.h"
#include "phalanx/launch/libtorch_version.h"
#include "phalanx/launch/rank_rendezvous.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/launch/testing/netns_nodes.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/free_address.h"
#include "phalanx/store/testing/tcp_proxy.h"

namespace phalanx {
namespace {

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
              AllOf(HasSubstr("sum 6"), HasSubstr("backend: " + expected + ", 3 ranks on this node")));
}

INSTANTIATE_TEST_SUITE_P(Backends, UnderPhalanxLaunch, testing::Values("auto", "shm", "shm+gloo", "gloo"),
                         [](const auto& info) {
                           return info.param == std::string("shm+gloo") ? "shm_gloo" : info.param;
                         });

// Runs two ranks with this environment variable and these options for shared heaps. Returns their output.
std::string output_of_heap_ranks(const std::string& variable, const std::vector<std::string>& options = {},
                                 const std::string& limits = "true") {
  auto environment = clean_environment();
  if (!variable.empty()) environment["PHALANX_SHARED_HEAP"] = variable;
  std::vector<std::string> command{
      built_program("launch_test_program"), "supervise", "2", "/bin/sh", "-c", limits + " && exec \"$0\" \"$@\"",
      built_program("launch_test_worker")};
  command.insert(command.end(), options.begin(), options.end());
  CollectedProcess process(command, environment);
  EXPECT_EQ(process.wait(), variable == "2" ? 2 : 0) << process.output();
  return process.output();
}

TEST(ProcessContextTest, LargeTensorsLieInSharedHeapsWhereTheUserSaysSo) {
  for (const std::string& output : {output_of_heap_ranks("1"), output_of_heap_ranks("", {"--shared-heap", "true"})}) {
    EXPECT_THAT(output, AllOf(HasSubstr("rank 0 shares its heap"), HasSubstr("rank 1 shares its heap"),
                              HasSubstr(" a rank, large tensors in shared heaps"), HasSubstr("sum 3")));
  }
  for (const std::string& output :
       {output_of_heap_ranks(""), output_of_heap_ranks("0"), output_of_heap_ranks("1", {"--shared-heap", "false"})}) {
    EXPECT_THAT(output, AllOf(Not(HasSubstr("shared heaps")), Not(HasSubstr("shares its heap")), HasSubstr("sum 3")));
  }
  EXPECT_THAT(output_of_heap_ranks("2"), HasSubstr("PHALANX_SHARED_HEAP"));
}

// The shared heap reserves as many addresses as the machine has memory, and a rank needs more beside it.
TEST(ProcessContextTest, WithoutASharedHeapTensorsAreCopied) {
  if (kUnderSanitizer) GTEST_SKIP() << kWhyNoMemoryLimit;
  const std::int64_t kib = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) / 1024;
  if (kib < 4 << 20) GTEST_SKIP() << "libtorch does not fit into as many addresses as this machine has memory (4 GiB)";
  const std::string output = output_of_heap_ranks("1", {}, fmt::format("ulimit -v {}", kib));
  EXPECT_THAT(output, AllOf(HasSubstr("large tensors are copied between the ranks of a node: the shared heap cannot "
                                      "be made: "),
                            Not(HasSubstr("shares its heap")), HasSubstr("sum 3")));
}

TEST(ProcessContextTest, AWrongBackendIsTold) {
  CollectedProcess process({built_program("launch_test_program"), "supervise", "2", built_program("launch_test_worker"),
                            "--backend", "gluu"});
  EXPECT_EQ(process.wait(), 2);
  EXPECT_THAT(process.output(), HasSubstr("backend 'gluu' (did you mean 'gloo'?): expected auto, shm, gloo, mpi, "
                                          "shm+gloo, shm+mpi, nccl, nccl+gloo, nccl+mpi or local\n"));
  EXPECT_EQ(times_in(process.output(), "gluu"), 1) << process.output();
}

// Without a GPU it is an error; nothing silently runs on the CPU instead.
TEST(ProcessContextTest, NcclWantsAGpu) {
  if (access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "this machine has a GPU";
  for (const std::string backend : {"nccl", "nccl+gloo"}) {
    CollectedProcess process({built_program("launch_test_program"), "supervise", "2",
                              built_program("launch_test_worker"), "--backend", backend});
    EXPECT_EQ(process.wait(), 2);
    EXPECT_EQ(times_in(process.output(), "backend " + backend + " moves CUDA tensors, and the device is cpu: choose"),
              1)
        << process.output();
  }
}

// A request to the store takes 20 s here. The bound holds on any machine.
TEST(ProcessContextTest, ARankLeavesItsRendezvousThoughTheStoreIsSilent) {
  TcpStoreServer server;
  TcpProxy link(server.address());
  WorkerEnvironment environment;
  environment.rendezvous = WorkerEnvironment::Rendezvous::launcher;
  environment.store = link.address();
  RankRendezvous rank_rendezvous = rendezvous_ranks(environment, {.timeout = std::chrono::seconds(20)});
  TcpStore other(server.address());
  EXPECT_EQ(other.try_get("init/gone/0"), std::nullopt);
  link.stall();
  const auto start = std::chrono::steady_clock::now();
  rank_rendezvous = {};
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  link.resume();
  EXPECT_EQ(other.get("init/gone/0", std::chrono::seconds(20)), "");
}

// Like torch's env:// by hand: rank 0 hosts the store at MASTER_ADDR:MASTER_PORT.
TEST(ProcessContextTest, StaticMasterAndTcpMethod) {
  for (const bool by_environment : {true, false}) {
    const HostPort address = free_address();
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

// The ranks are not told which of them share a node.
TEST(ProcessContextTest, RanksOfTwoMachinesMeetOnTwoLevels) {
  const NetnsNodes machines(2);
  SKIP_WITHOUT(machines);
  for (const std::string backend : {"auto", "shm+gloo", "gloo"}) {
    std::vector<std::unique_ptr<CollectedProcess>> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      auto environment = clean_environment();
      environment["RANK"] = std::to_string(rank);
      environment["WORLD_SIZE"] = "3";
      environment["MASTER_ADDR"] = machines.address(0);
      environment["MASTER_PORT"] = "29400";  // no other process uses it there
      environment["PHALANX_JOB_SECRET"] = "the secret of this test";
      std::vector<std::string> command = machines.on(rank / 2);
      command.insert(command.end(), {built_program("launch_test_worker"), "--backend", backend});
      ranks.push_back(std::make_unique<CollectedProcess>(command, environment));
    }
    const std::string expected = backend == "gloo" ? "gloo" : "shm+gloo";
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ranks[static_cast<std::size_t>(rank)]->wait(), 0) << ranks[static_cast<std::size_t>(rank)]->output();
      EXPECT_THAT(ranks[static_cast<std::size_t>(rank)]->output(),
                  HasSubstr(fmt::format("rank {} of 3, local {} of {}, {} on cpu, sum 6", rank, rank % 2,
                                        rank == 2 ? 1 : 2, expected)));
    }
    EXPECT_THAT(ranks[0]->output(), HasSubstr("gloo's data sockets let in only the job's ranks"));
    EXPECT_EQ(ranks[0]->output().find("shared memory is this user's only") != std::string::npos, backend != "gloo");
  }
}

// Ranks of one store. The test hosts it, as a launcher would.
class RollCall : public testing::Test {
 protected:
  std::unique_ptr<CollectedProcess> start(int rank, int world_size, std::chrono::milliseconds timeout = kStartLimit) {
    auto environment = clean_environment();
    environment["RANK"] = std::to_string(rank);
    environment["WORLD_SIZE"] = std::to_string(world_size);
    environment["PHALANX_STORE"] = server_.address().text();
    environment["PHALANX_JOB_SECRET"] = kSecret;
    return std::make_unique<CollectedProcess>(
        std::vector<std::string>{built_program("launch_test_worker"), "--timeout-ms", std::to_string(timeout.count())},
        environment);
  }
  void wait_for_rank(int rank) {
    TcpStore(server_.address(), {.secret = kSecret}).wait({fmt::format("init/claim/{}", rank)}, kStartLimit);
  }
  static constexpr const char* kSecret = "the secret of this test";
  TcpStoreServer server_{{.secret = kSecret}};
};

TEST_F(RollCall, ThoseWhoDoNotComeAreNamed) {
  auto rank = start(1, 4, std::chrono::milliseconds(1500));
  EXPECT_EQ(rank->wait(), 1);
  EXPECT_THAT(rank->output(), AllOf(HasSubstr("store at " + server_.address().text()),
                                    HasSubstr("of 4 ranks these have not come within 1.5 s: 0, 2, 3")));
}

// All ranks get the error at once, not after the timeout.
TEST_F(RollCall, ARankThatComesTwiceIsNamedToAll) {
  auto first = start(1, 4);
  auto other = start(2, 4);
  wait_for_rank(1);
  wait_for_rank(2);
  auto twice = start(1, 4);
  for (auto* rank : {&first, &other, &twice}) {
    EXPECT_EQ((*rank)->wait(), 1);
    EXPECT_THAT((*rank)->output(), HasSubstr("rank 1 was started twice: another process has it already (store at " +
                                             server_.address().text()));
  }
}

// All ranks have joined, and rank 0 is stopped before it has published the hosts. The test plays rank 0.
TEST_F(RollCall, RankZeroThatStandsStillWhenAllHaveComeIsNamed) {
  const pid_t zero = fork();
  if (zero == 0)
    for (;;) pause();
  kill(zero, SIGSTOP);
  TcpStore store(server_.address(), {.secret = kSecret});
  const std::string here = "init/here/" + local_host_id();
  store.set(fmt::format("{}/{}", here, store.add(here + "/came", 1)),
            fmt::format("0 {}", ProcessProbe::identity_of(zero)));
  store.set("init/claim/0", "the test");
  store.add("init/arrived", 1);
  auto waits = start(1, 2);
  EXPECT_EQ(waits->wait(), 1);
  EXPECT_THAT(waits->output(),
              HasSubstr(fmt::format("the ranks did not all start: rank 0 is stopped (SIGSTOP): process {} ", zero)));
  kill(zero, SIGKILL);
  waitpid(zero, nullptr, 0);
}

TEST_F(RollCall, RankZeroThatDoesNotSayWhereAllAreIsNamedWhenTheTimeIsUp) {
  TcpStore store(server_.address(), {.secret = kSecret});
  store.set("init/claim/0", "the test");
  store.add("init/arrived", 1);
  auto waits = start(1, 2, std::chrono::milliseconds(1500));
  EXPECT_EQ(waits->wait(), 1);
  EXPECT_THAT(waits->output(), HasSubstr("all 2 ranks have come, but rank 0 has not said within 1.5 s where they are"));
}

TEST_F(RollCall, AnotherWorldSizeIsNamedToAll) {
  auto first = start(1, 4);
  wait_for_rank(1);
  auto disagrees = start(2, 5);
  for (auto* rank : {&first, &disagrees}) {
    EXPECT_EQ((*rank)->wait(), 1);
    EXPECT_THAT((*rank)->output(),
                HasSubstr("rank 2 was started with a world size of 5 and another rank with 4 (store at " +
                          server_.address().text()));
  }
}

// Sets the value that a rank of another build would have set.
TEST_F(RollCall, OtherVersionsAreNamedToAll) {
  auto first = start(1, 4);
  wait_for_rank(1);
  TcpStore store(server_.address(), {.secret = kSecret});
  EXPECT_EQ(store.get("init/version/Phalanx", kStartLimit), fmt::format("1 {}", version()));
  store.set("init/version/libtorch", "1 0.0.1");
  auto other = start(2, 4);
  for (auto* rank : {&first, &other}) {
    EXPECT_EQ((*rank)->wait(), 1);
    EXPECT_THAT(
        (*rank)->output(),
        AllOf(HasSubstr(fmt::format("the ranks do not have the same version of libtorch: 0.0.1 on rank 1; {} on "
                                    "rank 2 (store at {}",
                                    libtorch_version(), server_.address().text())),
              HasSubstr("start every rank with the same build of the program")));
  }
}

// The backend determines how the ranks would compare everything else.
TEST_F(RollCall, OtherBackendsAreNamedToAll) {
  auto first = start(1, 4);
  wait_for_rank(1);
  TcpStore store(server_.address(), {.secret = kSecret});
  EXPECT_EQ(store.get("init/backend", kStartLimit), "1 auto");
  store.set("init/backend", "1 gloo");
  auto other = start(2, 4);
  for (auto* rank : {&first, &other}) {
    EXPECT_EQ((*rank)->wait(), 1);
    EXPECT_THAT((*rank)->output(),
                AllOf(HasSubstr("the ranks do not have the same backend: gloo on rank 1; auto on rank 2 (store at "),
                      HasSubstr("[comm] backend, --backend")));
  }
}

}  // namespace
}  // namespace phalanx
