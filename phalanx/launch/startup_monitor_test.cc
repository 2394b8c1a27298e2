// Ranks that die or are stopped during the rendezvous or while they create the world.
#include "phalanx/launch/startup_monitor.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/supervisor/stopped_ranks.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/launch/testing/launcher_process.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/free_address.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

class StartupMonitorTest : public testing::Test {
 protected:
  StartupMonitorTest() : child_(fork()) {
    if (child_ == 0)
      for (;;) pause();
  }
  ~StartupMonitorTest() override {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  std::shared_ptr<Store> client() const { return std::make_shared<TcpStore>(server_.address()); }
  std::unique_ptr<StartupMonitor> startup_monitor(int rank, const std::string& host_id = "here") const {
    return std::make_unique<StartupMonitor>(
        client(), StartupMonitor::Options{.rank = rank, .world_size = 2, .host_id = host_id, .heartbeat = 400ms});
  }
  /// The reason that a waiting rank gets; it would wait for a minute.
  static std::string reason_of(StartupMonitor& startup_monitor, Store& store) {
    try {
      store.get("never", 60s);
    } catch (const CommError&) {
      return startup_monitor.failure_reason();
    }
    return "nothing";
  }

  TcpStoreServer server_;
  const pid_t child_;  // stands for rank 1's process
};

TEST_F(StartupMonitorTest, ARankThatHasComeAndIsStoppedIsNamedToThoseWhoWaitForMore) {
  const auto mine = startup_monitor(0);
  EXPECT_EQ(mine->failure_in_rendezvous(), "");
  client()->add("here/here/came", 1);
  EXPECT_EQ(mine->failure_in_rendezvous(), "");  // rank 1 has not written its identity yet
  client()->set("here/here/2", fmt::format("1 {}", ProcessProbe::identity_of(child_)));
  EXPECT_EQ(mine->failure_in_rendezvous(), "");
  kill(child_, SIGSTOP);
  EXPECT_TRUE(comes_true([&] {
    return mine->failure_in_rendezvous().starts_with(fmt::format("rank 1 is stopped (SIGSTOP): process {} ", child_));
  }));
  kill(child_, SIGKILL);
  EXPECT_TRUE(
      comes_true([&] { return mine->failure_in_rendezvous() == fmt::format("rank 1 has died (process {})", child_); }));
}

TEST_F(StartupMonitorTest, WhoMakesTheWorldHearsOfARankThatIsStopped) {
  const auto mine = startup_monitor(0);
  const auto store = client();
  mine->all_came(store, {ProcessProbe::identity(), ProcessProbe::identity_of(child_)});
  kill(child_, SIGSTOP);
  EXPECT_THAT(reason_of(*mine, *store), HasSubstr("rank 1 is stopped (SIGSTOP): process "));
}

TEST_F(StartupMonitorTest, WhoMakesTheWorldHearsOfARankThatHasGoneUnlessItHadStarted) {
  for (const bool had_started : {true, false}) {
    const auto mine = startup_monitor(0);
    auto other = startup_monitor(1);
    const auto store = client();
    const std::vector<std::string> identities{ProcessProbe::identity(), ProcessProbe::identity()};
    mine->all_came(store, identities);
    other->all_came(client(), identities);
    if (had_started) other->started();
    other.reset();
    if (had_started) {
      {
        const auto goes_later = client();
        goes_later->set_when_lost("gone later", "");
      }
      store->get("gone later", 60s);
      EXPECT_EQ(store->try_get(StartupMonitor::kGone), std::nullopt);
      EXPECT_EQ(mine->failure_reason(), "");
      mine->started();
    } else {
      EXPECT_EQ(reason_of(*mine, *store), "rank 1 has died, or ended, before all ranks had started");
    }
  }
}

// On another node, before it has joined. There only its launcher sees the process.
TEST_F(StartupMonitorTest, ALaunchersWordOfARankOfItsOwnIsHeard) {
  const auto keys = std::make_shared<PrefixStore>(client(), "init");
  StartupMonitor mine(keys, {.rank = 0, .world_size = 2, .host_id = "here", .heartbeat = 400ms});
  const StoppedRanks launcher(server_.address(), "", {{1, child_}});
  EXPECT_EQ(mine.failure_in_rendezvous(), "");
  kill(child_, SIGSTOP);
  EXPECT_TRUE(comes_true([&] {
    return mine.failure_in_rendezvous().starts_with(
        fmt::format("rank 1 is stopped (SIGSTOP): process {} of host ", child_));
  }));
  kill(child_, SIGCONT);
  EXPECT_TRUE(comes_true([&] { return mine.failure_in_rendezvous().empty(); }));
}

// Under the launcher, before the rank has contacted any other process.
TEST_F(StartupMonitorTest, ARankThatIsStoppedBeforeItComesIsNamed) {
  for (const std::string backend : {"shm", "gloo"}) {
    auto environment = clean_environment();
    environment["PHALANX_COMM_HEARTBEAT_SECONDS"] = "1";
    CollectedProcess process({built_program("launch_test_program"), "supervise", "3", "--blame-ms=200", "/bin/sh", "-c",
                              "if [ $RANK = 1 ]; then kill -STOP $$; fi; exec \"$0\" \"$@\"",
                              built_program("launch_test_worker"), "--backend", backend},
                             environment);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(process.wait(), 1);
    EXPECT_THAT(process.output(), HasSubstr("the ranks did not all start: rank 1 is stopped (SIGSTOP): process "));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);  // about 2 s on a quiet machine; 300 s if undetected
  }
}

TEST_F(StartupMonitorTest, ARankOfAnotherNodeThatIsStoppedBeforeItComesIsNamed) {
  const std::string endpoint = free_address().text();
  auto environment = clean_environment();
  environment["PHALANX_COMM_HEARTBEAT_SECONDS"] = "2";
  environment["PHALANX_JOB_SECRET"] = "a secret of the two nodes here";
  std::vector<std::unique_ptr<CollectedProcess>> nodes;
  for (const char* node : {"0", "1"})
    nodes.push_back(std::make_unique<CollectedProcess>(
        std::vector<std::string>{built_program("launch_test_program"), "supervise", "1", "--endpoint=" + endpoint,
                                 "--min-nodes=2", "--max-nodes=2", fmt::format("--node-rank={}", node), "/bin/sh", "-c",
                                 "if [ $RANK = 1 ]; then kill -STOP $$; fi; exec \"$0\" \"$@\"",
                                 built_program("launch_test_worker"), "--backend", "gloo"},
        environment));
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& node : nodes) {
    EXPECT_EQ(node->wait(), 1);
    EXPECT_THAT(node->output(), HasSubstr("the ranks did not all start: rank 1 is stopped (SIGSTOP): process "));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s);  // about 3 s on a quiet machine; 300 s if undetected
}

}  // namespace
}  // namespace phalanx
