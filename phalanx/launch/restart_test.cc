// Communicators of ranks that are restarted on every node of a job: after a rank was killed, once or repeatedly, or
// after a node has joined.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/testing/collected_process.h"
#include "phalanx/launch/testing/launcher_process.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/free_address.h"

namespace phalanx {
namespace {

using Words = std::vector<std::string>;

std::unique_ptr<RunningLauncher> start_node(const std::string& endpoint, int ranks, Words arguments,
                                            const Words& of_worker) {
  Words all{"--endpoint=" + endpoint, "--last-call-ms=200", "--keep-alive-ms=500"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  all.push_back(built_program("launch_test_worker"));
  all.insert(all.end(), of_worker.begin(), of_worker.end());
  return std::make_unique<RunningLauncher>(
      ranks, all,
      RunningLauncher::Options{
          .environment = {{"PHALANX_JOB_SECRET", "a secret that both nodes know"}, {"OMP_NUM_THREADS", "1"}}});
}

class RestartedRanks : public testing::TestWithParam<const char*> {};

TEST_P(RestartedRanks, AddUpAgainAfterOneWasKilledOnAnotherNode) {
  const std::string endpoint = free_address().text();
  std::vector<std::unique_ptr<RunningLauncher>> nodes;
  for (int node = 0; node < 2; ++node)
    nodes.push_back(start_node(
        endpoint, 2, {"--min-nodes=2", "--max-nodes=2", fmt::format("--node-rank={}", node), "--max-restarts=1"},
        {"--backend", GetParam(), "--killed-once", "3"}));
  std::string said;
  for (const auto& node : nodes) {
    EXPECT_EQ(node->wait(), 0) << node->err();
    said += node->out() + node->err();
  }
  for (int rank = 0; rank < 4; ++rank) EXPECT_THAT(said, HasSubstr(fmt::format("rank {} of 4, local ", rank)));
  EXPECT_EQ(times_in(said, ", sum 10\n"), 4) << said;
  EXPECT_THAT(nodes[0]->err(), AllOf(HasSubstr("rank 3 (host "), HasSubstr("was killed by signal 9 (SIGKILL)"),
                                     HasSubstr("all ranks restart (restart 1 of 1)")));
}

// One rank after another is killed, at a random moment of their common work.
TEST_P(RestartedRanks, AddUpHoweverOftenOneIsKilledAtAnyMoment) {
  constexpr int kRanks = 3, kKills = 4;
  std::mt19937 random(7);
  const TempDirectory notes("notes");
  const auto node = start_node(free_address().text(), kRanks, {fmt::format("--max-restarts={}", kKills)},
                               {"--backend", GetParam(), "--notes", notes.path().string()});
  std::set<pid_t> processes;
  for (int kills = 0; kills <= kKills; ++kills) {
    std::array<pid_t, kRanks> ranks{};
    // All ranks of this attempt have computed one sum, and continue.
    ASSERT_TRUE(comes_true([&] {
      for (int rank = 0; rank < kRanks; ++rank) {
        std::ifstream note(notes.path() / fmt::format("sum.{}", rank));
        pid_t& process = ranks[static_cast<std::size_t>(rank)];
        if (!(note >> process) || processes.contains(process)) return false;
      }
      return true;
    })) << node->err();
    processes.insert(ranks.begin(), ranks.end());
    if (kills == kKills) break;
    // Any moment may show an error: the sleep gives a random time, it does not order anything.
    usleep(random() % 20'000);
    kill(ranks[random() % kRanks], SIGKILL);
  }
  write_note(notes, "go");
  EXPECT_EQ(node->wait(), 0) << node->err();
  EXPECT_EQ(times_in(node->out() + node->err(), ", sum 6\n"), kRanks) << node->err();
  EXPECT_THAT(node->err(), HasSubstr(fmt::format("all ranks restart (restart {} of {})", kKills, kKills)));
  EXPECT_EQ(processes.size(), static_cast<std::size_t>(kRanks * (kKills + 1)));
  for (const pid_t process : processes) EXPECT_TRUE(is_gone(process)) << process;
}

INSTANTIATE_TEST_SUITE_P(Backends, RestartedRanks, testing::Values("auto", "gloo"),
                         [](const auto& info) { return info.param; });

TEST(RestartedRanks, AddUpInALargerWorldAfterANodeHasCome) {
  const std::string endpoint = free_address().text();
  const Words nodes{"--min-nodes=1", "--max-nodes=2"}, of_worker{"--until-world", "3"};
  const auto first = start_node(endpoint, 1, nodes, of_worker);
  ASSERT_TRUE(comes_true([&] { return first->err().find("1 ranks add up") != std::string::npos; })) << first->err();
  const auto second = start_node(endpoint, 2, nodes, of_worker);
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  const std::string said = first->out() + second->out();
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(said, HasSubstr(fmt::format("rank {} of 3, local ", rank)));
  EXPECT_EQ(times_in(said, ", sum 6\n"), 3) << said;
}

}  // namespace
}  // namespace phalanx
