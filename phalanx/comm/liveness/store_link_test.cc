// A proxy makes the link between a rank and the store bad: slow and lossy, silent, broken. The ranks behave as on
// different nodes: they cannot observe each other's processes and learn about each other only through the store.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <stdexcept>

#include "phalanx/base/testing/comes_true.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/liveness/heartbeat_monitor.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/store/testing/tcp_proxy.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

constexpr int kLinkRanks = 3;
constexpr int kFar = 1;  // behind the proxy
constexpr auto kLimit = 2000ms;

// A world whose rank kFar reaches the store through the link.
class StoreLink {
 public:
  std::shared_ptr<Communicator> join(int rank) const {
    auto store = std::make_shared<TcpStore>(rank == kFar ? link.address() : server_.address());
    return make_gloo_communicator(
        store, rank, kLinkRanks,
        {.identity = fmt::format("machine-{} {} 0", rank, getpid()), .communicator = {.heartbeat = kLimit}});
  }

 private:
  TcpStoreServer server_;

 public:
  TcpProxy link{server_.address()};
};

void expect_words(const std::string& text, const std::string& words) {
  if (text.find(words) == std::string::npos)
    throw std::runtime_error(fmt::format("'{}' is not in the error: {}", words, text));
}

float sum_with(Communicator& comm) {
  at::Tensor x = at::full({1000}, comm.rank() + 1.0F);
  comm.all_reduce(x);
  return x.const_data_ptr<float>()[999];
}

TEST(Failures, ASlowAndLossyLinkToTheStoreIsNoFailure) {
  StoreLink stage;
  stage.link.delay(20ms);
  stage.link.lose_one_of(7);
  FaultWorld world(kLinkRanks, [&](FaultRank& self) {
    const auto comm = stage.join(self.rank());
    for (int i = 0; i < 20; ++i) {
      if (const float sum = sum_with(*comm); sum != 6.0F) throw std::runtime_error(fmt::format("the sum is {}", sum));
      if (i % 10 == 0) comm->split(0, comm->rank(), fmt::format("group {}", i))->barrier();
    }
  });
  EXPECT_EQ(world.finish(), "");
  EXPECT_GT(stage.link.bytes(), 1000);
}

// The far rank computes while the others wait for it, whatever happens to its link; then it waits, too. Returns its
// error, or that of the others, which must come within `bound`.
std::string error_of_link(FaultRank& self, Communicator& comm, std::chrono::milliseconds bound) {
  comm.barrier();
  self.arrive();
  if (self.rank() == kFar) self.await_go(1);
  std::string text = self.error_within(self.rank() == kFar ? 60'000ms : bound, [&] {
    for (;;) sum_with(comm);
  });
  expect_words(text, "all_reduce(float32[1000], sum)");
  return text;
}

// The ranks cannot know the state of the far rank. Nor can it know theirs, once it waits, too.
TEST(Failures, ALinkToTheStoreThatGoesSilentIsAnErrorOnAllWithinTheHeartbeatLimit) {
  EXPECT_EQ(again_if_late([] {
              StoreLink stage;
              FaultWorld world(kLinkRanks, [&](FaultRank& self) {
                auto comm = stage.join(self.rank());
                expect_words(error_of_link(self, *comm, kLimit), self.rank() == kFar
                                                                     ? " has not answered this rank for "
                                                                     : "rank 1 has given no sign of life");
                self.arrive();
                self.await_go(2);
                require_leaving_in_time(comm);
              });
              for (int rank = 0; rank < kLinkRanks; ++rank) EXPECT_TRUE(world.await(rank, 1));
              world.note_fault();
              stage.link.stall();
              for (const int rank : {0, 2}) EXPECT_TRUE(world.await(rank, 2)) << rank;
              world.go(1);
              world.go(2);
              return world.finish();
            }),
            "");
}

// How long a rank takes to leave that gets an answer of the store after 5 s.
std::chrono::nanoseconds time_to_leave_over_a_slow_link() {
  TcpStoreServer server;
  TcpProxy link(server.address());
  const HeartbeatMonitor stays(std::make_shared<TcpStore>(server.address()), 0, 2, {});
  auto leaves =
      std::make_unique<HeartbeatMonitor>(std::make_shared<TcpStore>(link.address()), 1, 2, HeartbeatMonitor::Options{});
  link.delay(2500ms);  // an answer takes 5 s
  const auto start = std::chrono::steady_clock::now();
  leaves.reset();
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_TRUE(comes_true([&] { return !stays.who_left().empty() || stays.has_lost_rank(); }));
  EXPECT_EQ(stays.who_left(), "rank 1 has ended, or closed the communicator");
  EXPECT_FALSE(stays.has_lost_rank());
  return took;
}

TEST(Failures, WhoLeavesOverASlowLinkToTheStoreDoesNotWaitAndHasLeft) {
  // A stalled machine makes it late once, not three times.
  auto took = time_to_leave_over_a_slow_link();
  for (int more = 0; more < 2 && took >= 2500ms; ++more) took = time_to_leave_over_a_slow_link();
  EXPECT_LT(took, 2500ms);
}

TEST(Failures, ALinkToTheStoreThatBreaksIsOneClearErrorOnAll) {
  EXPECT_EQ(again_if_late([] {
              StoreLink stage;
              FaultWorld world(kLinkRanks, [&](FaultRank& self) {
                const auto comm = stage.join(self.rank());
                expect_words(error_of_link(self, *comm, 1000ms),
                             self.rank() == kFar ? "this rank has lost its connection to the " : "rank 1 has died");
              });
              for (int rank = 0; rank < kLinkRanks; ++rank) EXPECT_TRUE(world.await(rank, 1));
              world.note_fault();
              stage.link.cut();
              for (const int rank : {0, 2}) EXPECT_TRUE(world.await_end(rank)) << rank;
              world.go(1);
              return world.finish();
            }),
            "");
}

}  // namespace
}  // namespace phalanx
