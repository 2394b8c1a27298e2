// The link between a node's launcher and the node that hosts the rendezvous fails; a proxy simulates it.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/testing/launcher_process.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/free_address.h"
#include "phalanx/store/testing/tcp_proxy.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

// Two nodes: the host, and one that reaches it through the link. Their ranks use the host's store directly, not through
// the link.
class NodeLinkTest : public testing::Test {
 protected:
  NodeLinkTest() : endpoint_(free_address()), link_(endpoint_), notes_("notes") {}

  void start(const std::vector<std::string>& more = {}) {
    for (int node = 0; node < 2; ++node) {
      std::vector<std::string> words{"--endpoint=" + (node == 0 ? endpoint_ : link_.address()).text(), "--min-nodes=2",
                                     "--max-nodes=2", fmt::format("--node-rank={}", node), "--keep-alive-ms=500"};
      words.insert(words.end(), more.begin(), more.end());
      for (const std::string& word : {test_program(), std::string("hold"), notes_.path().string()})
        words.push_back(word);
      launchers_.push_back(std::make_unique<RunningLauncher>(
          1, words,
          RunningLauncher::Options{.environment = {{"PHALANX_JOB_SECRET", "a secret of the two nodes here"}}}));
    }
  }
  void await_ranks() {
    for (int rank = 0; rank < 2; ++rank) ranks_.push_back(noted_pid(notes_, fmt::format("hold.{}.of.2", rank)));
  }
  void expect_no_orphans() {
    for (const pid_t rank : ranks_) EXPECT_TRUE(comes_true([&] { return is_gone(rank); })) << rank;
  }
  // No node knows the state of the other: each reports what it knows, once.
  void expect_lost(const std::string& host_says) {
    EXPECT_EQ(launchers_[0]->wait(), 1);
    EXPECT_EQ(launchers_[1]->wait(), 1);
    EXPECT_THAT(launchers_[0]->err(), AllOf(HasSubstr(" with rank 1 was lost: "), HasSubstr(host_says)));
    EXPECT_THAT(launchers_[1]->err(),
                HasSubstr(fmt::format("the node that hosts the rendezvous at {} cannot be reached any more",
                                      link_.address().text())));
    expect_no_orphans();
  }

  const HostPort endpoint_;
  TcpProxy link_;
  TempDirectory notes_;
  std::vector<std::unique_ptr<RunningLauncher>> launchers_;
  std::vector<pid_t> ranks_;
};

TEST_F(NodeLinkTest, ASlowAndLossyLinkIsNoFailure) {
  link_.delay(30ms);
  link_.lose_one_of(7);
  start();
  await_ranks();
  const auto carried = link_.bytes();
  EXPECT_GT(carried, 100);
  EXPECT_TRUE(comes_true([&] { return link_.bytes() > carried + 1000; }));  // heartbeats
  write_note(notes_, "go");
  for (const auto& launcher : launchers_) EXPECT_EQ(launcher->wait(), 0) << launcher->err();
}

TEST_F(NodeLinkTest, ALinkThatGoesSilentIsALostNode) {
  start();
  await_ranks();
  const auto stalled_at = std::chrono::steady_clock::now();
  link_.stall();
  expect_lost("no sign of life for ");
  // Three heartbeats are 1.5 s, the store may answer within 5 s, and the ranks get 5 s to end.
  EXPECT_LT(std::chrono::steady_clock::now() - stalled_at, 60s);
}

TEST_F(NodeLinkTest, ALinkThatBreaksIsALostNode) {
  start();
  await_ranks();
  link_.cut();
  expect_lost("its launcher has ended");
}

// During this silence one or two heartbeats are missed, which is less than allowed.
TEST_F(NodeLinkTest, ALinkThatRecoversInTimeIsNoFailure) {
  start({"--keep-alive-ms=2000"});
  await_ranks();
  link_.stall();
  const auto carried = link_.bytes();
  write_note(notes_, "go");
  expect_no_orphans();  // the ranks have ended, and the nodes cannot tell each other
  std::this_thread::sleep_for(2500ms);
  EXPECT_EQ(link_.bytes(), carried);
  link_.resume();
  for (const auto& launcher : launchers_) EXPECT_EQ(launcher->wait(), 0) << launcher->err();
  EXPECT_GT(link_.bytes(), carried);
}

}  // namespace
}  // namespace phalanx
