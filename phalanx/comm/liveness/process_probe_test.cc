// Processes of this node that run, are stopped, die, and are mistaken for others.
#include "phalanx/comm/liveness/process_probe.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

class ProcessProbeTest : public testing::Test {
 protected:
  ProcessProbeTest() : child_(fork()) {
    if (child_ == 0)
      for (;;) pause();
    probe_ = std::make_unique<ProcessProbe>(
        std::vector{ProcessProbe::identity(), ProcessProbe::identity_of(child_), fmt::format("machine-1 {} 0", child_)},
        200ms);
  }
  ~ProcessProbeTest() override { end_child(); }
  void end_child() {
    if (kill(child_, SIGKILL) == 0) waitpid(child_, nullptr, 0);
  }

  const pid_t child_;
  std::unique_ptr<ProcessProbe> probe_;
};

TEST_F(ProcessProbeTest, AProcessThatRunsIsWell) {
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(probe_->can_see(rank)) << rank;
    EXPECT_TRUE(probe_->shares_network(rank)) << rank;
    EXPECT_FALSE(probe_->is_dead(rank)) << rank;
    EXPECT_EQ(probe_->failure_reason(rank), "") << rank;
  }
}

TEST_F(ProcessProbeTest, AStoppedProcessIsAFailureUntilItIsContinued) {
  kill(child_, SIGSTOP);
  ASSERT_TRUE(comes_true([&] { return !probe_->failure_reason(1).empty(); }));
  EXPECT_THAT(probe_->failure_reason(1), HasSubstr(fmt::format("is stopped (SIGSTOP): process {} has stood", child_)));
  EXPECT_FALSE(probe_->is_dead(1));
  kill(child_, SIGCONT);
  EXPECT_TRUE(comes_true([&] { return probe_->failure_reason(1).empty(); }));
}

TEST_F(ProcessProbeTest, WithoutALimitAStoppedProcessIsWell) {
  ProcessProbe patient({ProcessProbe::identity_of(child_)}, 0ms);
  kill(child_, SIGSTOP);
  ASSERT_TRUE(comes_true([&] { return !probe_->failure_reason(1).empty(); }));
  EXPECT_EQ(patient.failure_reason(0), "");
}

TEST_F(ProcessProbeTest, AZombieIsDeadAndSoIsAProcessThatIsGone) {
  kill(child_, SIGKILL);
  EXPECT_TRUE(comes_true([&] { return probe_->is_dead(1); }));  // nobody has waited for it
  const std::string died = fmt::format("has died (process {})", child_);
  EXPECT_EQ(probe_->failure_reason(1), died);
  waitpid(child_, nullptr, 0);
  EXPECT_TRUE(probe_->is_dead(1));
  EXPECT_EQ(probe_->failure_reason(1), died);
}

TEST_F(ProcessProbeTest, WhoseNumberBelongsToALaterProcessIsDead) {
  std::string earlier = ProcessProbe::identity_of(child_);
  const std::size_t start_time = earlier.find(' ', earlier.find(' ') + 1) + 1;
  earlier.insert(start_time, "1");
  ProcessProbe probe({earlier}, 200ms);
  EXPECT_TRUE(probe.is_dead(0)) << earlier;
}

TEST_F(ProcessProbeTest, WhoHadEndedBeforeIsDead) {
  const std::string identity = ProcessProbe::identity_of(child_);
  end_child();
  EXPECT_EQ(ProcessProbe::identity_of(child_), "");
  EXPECT_TRUE(ProcessProbe({identity}, 200ms).is_dead(0));
}

TEST_F(ProcessProbeTest, NothingIsKnownOfAnotherMachine) {
  EXPECT_FALSE(probe_->can_see(2));
  EXPECT_FALSE(probe_->shares_network(2));
  end_child();
  EXPECT_FALSE(probe_->is_dead(2));
  EXPECT_EQ(probe_->failure_reason(2), "");
}

TEST(HeartbeatTimeout, LeavesTimeForARareLook) {
  EXPECT_EQ(heartbeat_timeout(5000ms), 4000ms);
  EXPECT_EQ(heartbeat_timeout(5000ms, 20ms), 4000ms);
  EXPECT_EQ(heartbeat_timeout(5000ms, 500ms), 3600ms);
  EXPECT_EQ(heartbeat_timeout(2000ms, 200ms), 1000ms) << "half of the limit";
  EXPECT_EQ(heartbeat_timeout(0ms, 1000ms), 0ms);
}

// A program that has used up its descriptors cannot read /proc. That says nothing about the others.
TEST_F(ProcessProbeTest, WithoutADescriptorNobodyIsTakenForDead) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  rlimit none = limit;
  none.rlim_cur = 0;
  setrlimit(RLIMIT_NOFILE, &none);
  const bool dead = probe_->is_dead(1);
  const std::string why = probe_->failure_reason(1);
  setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_FALSE(dead);
  EXPECT_EQ(why, "");
}

}  // namespace
}  // namespace phalanx
