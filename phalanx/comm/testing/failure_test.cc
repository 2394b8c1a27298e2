// A rank is killed or stopped in every verb. All other ranks must get an error in time that names the rank and the
// operation, and must write their flight recorder. With shm and gloo, between processes. fault_world.h explains the
// bounds.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <stdexcept>
#include <string_view>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backend.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/liveness/process_probe.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_calls.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/comm/testing/forwarding_backend.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

constexpr int kRanks = 3;
constexpr int kVictim = 1;

// gloo_strangers: gloo between ranks that cannot look at each other's processes, as on different nodes. hierarchical:
// the victim shares a simulated node with rank 0, and rank 2 is on another.
enum class Kind { shm, gloo, gloo_strangers, hierarchical };

std::string name_of(Kind kind) {
  switch (kind) {
    case Kind::shm:
      return "Shm";
    case Kind::gloo:
      return "Gloo";
    case Kind::gloo_strangers:
      return "GlooStrangers";
    case Kind::hierarchical:
      return "TwoLevel";
  }
  return "";
}

std::shared_ptr<Communicator> make_world(Kind kind, const HostPort& server, int rank, int size,
                                         CommunicatorOptions options, int store_rank = -1) {
  auto store = std::make_shared<TcpStore>(server);
  if (kind == Kind::shm) return make_shm_communicator(*store, rank, size, std::move(options));
  if (kind == Kind::hierarchical)
    return make_hierarchical_communicator(
        make_gloo_communicator(store, rank, size, {.communicator = options}),
        {.communicator = options, .nodes = {0, 0, 1}, .hint = std::nullopt, .smallest_bytes = 1, .by_estimate = false});
  return make_gloo_communicator(
      store, rank, size,
      {.store_rank = store_rank,
       .identity = kind == Kind::gloo_strangers ? fmt::format("machine-{} {} 0", rank, getpid()) : "",
       .communicator = std::move(options)});
}

at::Tensor ones(std::int64_t count) { return at::full({count}, 1.0F); }

void require_parts(const std::string& text, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts)
    if (text.find(part) == std::string::npos)
      throw std::runtime_error(fmt::format("'{}' is not in the error: {}", part, text));
}

// Returns the operation number in "op 7 of group 'the world', rank 0 of 3: ".
std::int64_t op_number_of(const std::string& text, const std::string& group, int rank) {
  std::smatch found;
  const std::regex words(fmt::format(", op ([0-9]+) of group '{}', rank {} of {}: ", group, rank, kRanks));
  if (!std::regex_search(text, found, words))
    throw std::runtime_error(
        fmt::format("the number of the operation in group '{}' is not in the error: {}", group, text));
  return std::stoll(found[1]);
}

class FolderTest : public ::testing::Test {
 protected:
  FolderTest() {
    std::string name = ::testing::TempDir() + "failures_XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~FolderTest() override { std::filesystem::remove_all(folder_); }

  // Checks the contents of the rank's flight recorder, which must have been written.
  void expect_recorded(int rank, const std::string& reason) const {
    const auto path = folder_ / fmt::format("rank_{}.json", rank);
    ASSERT_TRUE(std::filesystem::exists(path)) << path;
    const auto dump = nlohmann::json::parse(read_file(path));
    EXPECT_THAT(dump["reason"].get<std::string>(), HasSubstr(reason));
    bool failed = false;
    for (const auto& group : dump["groups"])
      for (const auto& entry : group["entries"]) failed |= entry["state"] == "failed";
    EXPECT_TRUE(failed) << path;
  }
  std::filesystem::path folder_;
};

struct Scene {
  Kind kind;
  std::int64_t count;
  bool in_the_middle;  // false: the victim has not joined the operation when it is struck, and the others wait in it
};

std::string name_of(const Scene& scene) {
  return fmt::format("{}_{}_{}", name_of(scene.kind), scene.count > 1000 ? "big" : "small",
                     scene.in_the_middle ? "in_the_middle" : "before_it_joins");
}

class EveryVerb : public FolderTest, public ::testing::WithParamInterface<Scene> {
 protected:
  // Runs every verb in a separate group, all at once. The victim is struck while all other ranks are in them.
  std::string run(int signal, std::chrono::milliseconds bound, const std::string& what,
                  std::chrono::milliseconds limit) {
    const Scene scene = GetParam();
    TcpStoreServer server;
    FaultWorld world(kRanks, [&](FaultRank& self) {
      const auto comm = make_world(scene.kind, server.address(), self.rank(), kRanks,
                                   {.heartbeat = limit, .trace_folder = folder_.string()});
      struct Group {
        FaultCall call;
        std::shared_ptr<Communicator> comm;
        FaultCall::Pending wait;
        std::int64_t calls_before = 0;
      };
      std::vector<Group> groups;
      for (const FaultCall& call : fault_calls(kVictim)) {
        groups.push_back({call, comm->split(0, comm->rank(), "of " + call.name), {}, 0});
        if (call.prepare) call.prepare(*groups.back().comm, scene.count);
      }
      comm->barrier();
      if (self.rank() == kVictim && !scene.in_the_middle) {
        self.arrive();
        self.await_go(1);
      }
      while (!groups.empty()) {
        for (Group& group : groups) group.wait = group.call.begin(*group.comm, scene.count);
        self.arrive();
        std::erase_if(groups, [&](Group& group) {
          try {
            group.wait();
            ++group.calls_before;
            return false;
          } catch (const CommError& e) {
            if (self.rank() != kVictim) self.require_in_time(bound, e.what());
            require_told(group.call, e.what(), scene.count, kVictim);
            require_parts(e.what(),
                          {what, fmt::format("of group 'of {}', rank {} of 3: ", group.call.name, self.rank())});
            // The creation of a group is not an operation, but the exchanges before it are.
            if (!std::string_view(e.what()).starts_with("split(")) {
              const std::int64_t number = op_number_of(e.what(), group.comm->name(), self.rank());
              const std::int64_t before = group.calls_before;
              if (group.call.is_one_operation() ? number != before : number < before)
                throw std::runtime_error(fmt::format("{} calls were done before op {}: {}", before, number, e.what()));
            }
            return true;
          }
        });
      }
    });
    for (int rank = 0; rank < kRanks; ++rank)
      EXPECT_TRUE(world.await(rank, scene.in_the_middle ? 2 : 1)) << "rank " << rank << " did not come";
    world.strike(kVictim, signal);
    if (signal != SIGKILL) {
      // The other ranks have given the victim up. When it is continued, it gets that error.
      for (int rank = 0; rank < kRanks; ++rank)
        EXPECT_TRUE(rank == kVictim || world.await_end(rank)) << "rank " << rank << " hangs";
      world.go(1);
      world.send(kVictim, SIGCONT);
    }
    const std::string failures = world.finish();
    RecordProperty("worst_ms", static_cast<int>(world.worst().count()));
    for (int rank = 0; rank < kRanks; ++rank)
      if (rank != kVictim || signal != SIGKILL) expect_recorded(rank, what);
    return failures;
  }

  std::string run_again_if_late(int signal, std::chrono::milliseconds bound, const std::string& what,
                                std::chrono::milliseconds limit) {
    return again_if_late([&] {
      std::filesystem::remove_all(folder_);
      std::filesystem::create_directory(folder_);
      return run(signal, bound, what, limit);
    });
  }
};

class KilledAt : public EveryVerb {};
TEST_P(KilledAt, EveryVerb) { EXPECT_EQ(run_again_if_late(SIGKILL, 1s, "rank 1 has died", 5s), ""); }
INSTANTIATE_TEST_SUITE_P(Failures, KilledAt,
                         ::testing::Values(Scene{Kind::shm, 5, false}, Scene{Kind::shm, 300'000, false},
                                           Scene{Kind::shm, 5, true}, Scene{Kind::shm, 300'000, true},
                                           Scene{Kind::gloo, 5, false}, Scene{Kind::gloo, 300'000, false},
                                           Scene{Kind::gloo, 5, true}, Scene{Kind::gloo, 300'000, true},
                                           Scene{Kind::hierarchical, 300'000, false},
                                           Scene{Kind::hierarchical, 300'000, true}),
                         [](const auto& info) { return name_of(info.param); });

class StoppedAt : public EveryVerb {};
TEST_P(StoppedAt, EveryVerb) {
  const bool seen = GetParam().kind != Kind::gloo_strangers;
  const char* const what = seen ? "rank 1 is stopped (SIGSTOP)" : "rank 1 has given no sign of life";
  EXPECT_EQ(run_again_if_late(SIGSTOP, 1500ms, what, 1500ms), "");
}
INSTANTIATE_TEST_SUITE_P(Failures, StoppedAt,
                         ::testing::Values(Scene{Kind::shm, 5, false}, Scene{Kind::shm, 300'000, true},
                                           Scene{Kind::gloo, 5, false}, Scene{Kind::gloo, 300'000, true},
                                           Scene{Kind::gloo_strangers, 300'000, false},
                                           Scene{Kind::hierarchical, 300'000, true}),
                         [](const auto& info) { return name_of(info.param); });

// --- one case each

class OnBackend : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Failures, OnBackend, ::testing::Values(Kind::shm, Kind::gloo, Kind::gloo_strangers),
                         [](const auto& info) { return name_of(info.param); });

// Rank 0 waits for rank 2, which is alive and waits for the rank that dies. Each is in a synchronous call.
TEST_P(OnBackend, ARankThatWaitsForOneThatWaitsForTheDeadIsTold) {
  EXPECT_EQ(again_if_late([&] {
              TcpStoreServer server;
              FaultWorld world(kRanks, [&](FaultRank& self) {
                const auto comm = make_world(GetParam(), server.address(), self.rank(), kRanks, {});
                comm->barrier();
                self.arrive();
                if (self.rank() == kVictim) self.await_go(1);
                at::Tensor x = ones(5);
                const std::string text = self.error_within(1s, [&] { comm->recv(x, self.rank() == 0 ? 2 : kVictim); });
                require_parts(text, {"rank 1 has died", self.rank() == 0 ? "recv(float32[5] from rank 2, tag 0)"
                                                                         : "recv(float32[5] from rank 1, tag 0)"});
              });
              for (int rank = 0; rank < kRanks; ++rank) EXPECT_TRUE(world.await(rank, 1));
              world.strike(kVictim, SIGKILL);
              return world.finish();
            }),
            "");
}

// Computing, or a short stop, is not a failure. If processes can be inspected, neither is starvation.
TEST_P(OnBackend, ASlowRankIsWaitedFor) {
  const bool strangers = GetParam() == Kind::gloo_strangers;
  const auto limit = strangers ? 2000ms : 1000ms;
  TcpStoreServer server;
  FaultWorld world(2, [&](FaultRank& self) {
    const auto comm = make_world(GetParam(), server.address(), self.rank(), 2, {.heartbeat = limit});
    if (self.rank() == 1) {
      sched_param none{};
      if (!strangers) sched_setscheduler(0, SCHED_IDLE, &none);
      self.arrive();
      const auto end = std::chrono::steady_clock::now() + limit * 3 / 2;
      while (std::chrono::steady_clock::now() < end) {
      }
      sched_setscheduler(0, SCHED_OTHER, &none);
    }
    comm->barrier();
    at::Tensor x = ones(70'000);
    comm->all_reduce(x);
  });
  EXPECT_TRUE(world.await(1, 1));
  world.strike(1, SIGSTOP);
  world.send(1, SIGCONT);
  EXPECT_EQ(world.finish(), "");
}

// Two ranks have arrived. Rank 1 is stopped, and continues after rank 0 has ended.
std::string stop_until_the_other_ends(FaultWorld& world) {
  EXPECT_TRUE(world.await(0, 1) && world.await(1, 1));
  world.strike(1, SIGSTOP);
  EXPECT_TRUE(world.await_end(0));
  world.go(1);
  world.send(1, SIGCONT);
  return world.finish();
}

TEST_P(OnBackend, WithoutAHeartbeatAStoppedRankIsATimeOut) {
  EXPECT_EQ(again_if_late([&] {
              TcpStoreServer server;
              FaultWorld world(2, [&](FaultRank& self) {
                const auto comm =
                    make_world(GetParam(), server.address(), self.rank(), 2, {.timeout = 1500ms, .heartbeat = 0ms});
                comm->barrier();
                comm->mark_started();
                self.arrive();
                if (self.rank() == 1) self.await_go(1);
                const std::string text = self.error_within(10s, [&] { comm->barrier(); });
                if (self.rank() == 0) require_parts(text, {"timed out after", "not arrived: rank 1"});
              });
              return stop_until_the_other_ends(world);
            }),
            "");
}

TEST(HeartbeatLimit, IsFiveSecondsWhereNothingElseWasChosen) {
  unsetenv("PHALANX_COMM_HEARTBEAT_SECONDS");
  EXPECT_EQ(heartbeat_limit(std::nullopt), 5s);
  EXPECT_EQ(heartbeat_limit(2s), 2s);
  setenv("PHALANX_COMM_HEARTBEAT_SECONDS", "2.5", 1);
  EXPECT_EQ(heartbeat_limit(std::nullopt), 2500ms);
  EXPECT_EQ(heartbeat_limit(0s), 0s);
  unsetenv("PHALANX_COMM_HEARTBEAT_SECONDS");
}

TEST_P(OnBackend, AStoppedRankIsToldWithinFiveSecondsWhereNothingElseWasChosen) {
  EXPECT_EQ(again_if_late([&] {
              TcpStoreServer server;
              FaultWorld world(2, [&](FaultRank& self) {
                unsetenv("PHALANX_COMM_HEARTBEAT_SECONDS");
                const auto comm = make_world(GetParam(), server.address(), self.rank(), 2, {});
                comm->barrier();
                self.arrive();
                if (self.rank() == 1) return self.await_go(1);
                require_parts(self.error_within(5s, [&] { comm->barrier(); }), {"barrier()", "rank 1 "});
              });
              return stop_until_the_other_ends(world);
            }),
            "");
}

TEST_P(OnBackend, ARankThatDiesWhileTheWorldIsMadeIsNamed) {
  EXPECT_EQ(again_if_late([&] {
              TcpStoreServer server;
              FaultWorld world(kRanks, [&](FaultRank& self) {
                // Rank 2 does not join, so the other ranks wait.
                if (self.rank() == 2) return;
                self.arrive();
                const std::string text = self.error_within(
                    1s, [&] { make_world(GetParam(), server.address(), self.rank(), kRanks, {.first_timeout = 50s}); });
                require_parts(text, {"could not be made: ", "rank 1 has died"});
              });
              // The victim is in the rendezvous when its key is set.
              EXPECT_TRUE(world.await(0, 1) && world.await(1, 1));
              TcpStore store(server.address());
              store.get(GetParam() == Kind::shm ? "shm/world/1/0/1" : "gloo/1/world/rank/1", 60s);
              store.get(GetParam() == Kind::shm ? "shm/world/1/0/0" : "gloo/1/world/rank/0", 60s);
              world.strike(kVictim, SIGKILL);
              return world.finish();
            }),
            "");
}

// Arrives when the colours of a split have been exchanged and the group is about to be created. The victim stays there.
class SplittingBackend final : public ForwardingBackend {
 public:
  SplittingBackend(std::shared_ptr<Backend> below, FaultRank& self)
      : ForwardingBackend(std::move(below)), self_(self) {}
  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    self_.arrive();
    if (rank() == kVictim) self_.await_go(1);
    return ForwardingBackend::split(request);
  }

 private:
  FaultRank& self_;
};

// Deaths in every verb may all hit a split during its exchange, whose error names the exchange.
TEST_P(OnBackend, ARankThatDiesWhileAGroupIsMadeIsNamedWithTheSplit) {
  EXPECT_EQ(again_if_late([&] {
              TcpStoreServer server;
              FaultWorld world(kRanks, [&](FaultRank& self) {
                const auto whole = make_world(GetParam(), server.address(), self.rank(), kRanks, {});
                Communicator comm(std::make_shared<SplittingBackend>(whole->backend(), self), {.name = "the world"});
                const std::string text = self.error_within(1s, [&] { comm.split(0, -self.rank(), "reversed"); });
                require_parts(text, {fmt::format("split(color 0, key {}), of group 'the world', rank {} of 3: ",
                                                 -self.rank(), self.rank()),
                                     "rank 1 has died"});
              });
              for (int rank = 0; rank < kRanks; ++rank) EXPECT_TRUE(world.await(rank, 1));
              world.strike(kVictim, SIGKILL);
              return world.finish();
            }),
            "");
}

// A launcher ends the remaining ranks, perhaps before they have noticed a failure.
class Terminated : public FolderTest, public ::testing::WithParamInterface<Kind> {};
INSTANTIATE_TEST_SUITE_P(Failures, Terminated, ::testing::Values(Kind::shm, Kind::gloo),
                         [](const auto& info) { return name_of(info.param); });
TEST_P(Terminated, ARankWritesItsFlightRecorder) {
  TcpStoreServer server;
  FaultWorld world(2, [&](FaultRank& self) {
    const auto comm =
        make_world(GetParam(), server.address(), self.rank(), 2, {.trace_folder = (folder_ / "traces").string()});
    comm->barrier();
    const Work waits = self.rank() == 0 ? comm->barrier({.async = true}) : Work();
    self.arrive();
    self.await_go(1);
  });
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(world.await(rank, 1));
  for (int rank = 0; rank < 2; ++rank) world.send(rank, SIGTERM);
  EXPECT_EQ(world.finish(), "rank 0: signal 15\nrank 1: signal 15\n");
  for (int rank = 0; rank < 2; ++rank) {
    const auto dump = nlohmann::json::parse(read_file(folder_ / "traces" / fmt::format("rank_{}.json", rank)));
    EXPECT_EQ(dump["groups"][0]["entries"].size(), rank == 0 ? 2U : 1U);
  }
}

// Rank 0 hosts the store, as under torchrun. So the rank that reports the ends of others is itself killed or stopped.
class StoreHost : public ::testing::TestWithParam<std::tuple<Kind, int>> {};
INSTANTIATE_TEST_SUITE_P(Failures, StoreHost,
                         ::testing::Combine(::testing::Values(Kind::gloo, Kind::gloo_strangers),
                                            ::testing::Values(SIGKILL, SIGSTOP)),
                         [](const auto& info) {
                           return name_of(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) == SIGKILL ? "Killed" : "Stopped");
                         });
TEST_P(StoreHost, IsNamed) {
  const auto [kind, signal] = GetParam();
  EXPECT_EQ(again_if_late([&, kind = kind, signal = signal] {
              FaultWorld world(kRanks, [&, kind = kind, signal = signal](FaultRank& self) {
                std::unique_ptr<TcpStoreServer> server;
                if (self.rank() == 0) {
                  server = std::make_unique<TcpStoreServer>();
                  self.set_shared_text(server->address().text());
                }
                self.arrive();
                self.await_go(1);
                auto comm = make_world(kind, parse_host_port(self.shared_text(), "the test's store"), self.rank(),
                                       kRanks, {.heartbeat = 2000ms}, 0);
                comm->barrier();
                self.arrive();
                if (self.rank() == 0) self.await_go(2);
                at::Tensor x = ones(300'000);
                // When rank 0 runs again, it finds that the others are gone.
                const auto bound = self.rank() == 0 ? 60'000ms : signal == SIGKILL ? 1000ms : 2000ms;
                const std::string text = self.error_within(bound, [&] { comm->all_reduce(x); });
                if (self.rank() == 0) return;
                require_parts(text,
                              {"all_reduce(float32[300000], sum)", signal == SIGKILL    ? "rank 0 has died"
                                                                   : kind == Kind::gloo ? "rank 0 is stopped (SIGSTOP)"
                                                                                        : "rank 0 hosts the store"});
                require_leaving_in_time(comm);
              });
              EXPECT_TRUE(world.await(0, 1));
              world.go(1);
              for (int rank = 0; rank < kRanks; ++rank) EXPECT_TRUE(world.await(rank, 2));
              world.strike(0, signal);
              if (signal == SIGSTOP) {
                for (int rank = 1; rank < kRanks; ++rank) EXPECT_TRUE(world.await_end(rank));
                world.go(2);
                world.send(0, SIGCONT);
              }
              return world.finish();
            }),
            "");
}

}  // namespace
}  // namespace phalanx
