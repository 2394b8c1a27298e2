// The gloo backend across real processes: the suite, deaths and time-outs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/under_sanitizer.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Waits until every rank has come here. A rank that ends before others have seen their own error would be reported to
/// them as dead. One that does not come has failed, which is reported by itself.
void wait_for_all(TcpStore& store, int rank, int world) {
  std::vector<std::string> keys;
  for (int other = 0; other < world; ++other) keys.push_back(fmt::format("checked/{}", other));
  store.set(keys[static_cast<std::size_t>(rank)], "");
  try {
    store.wait(keys, seconds(20));
  } catch (const Error&) {
  }
}

// body(comm) in `world` processes, which end at any time, or once all of them are done.
std::string run_gloo_ranks(int world, const std::function<void(Communicator&)>& body, CommunicatorOptions options = {},
                           int killed_rank = -1, bool end_together = false) {
  TcpStoreServer server;
  return run_forked_ranks_or_threads(
      world,
      [&](int rank) {
        const auto comm = make_gloo_communicator(std::make_shared<TcpStore>(server.address()), rank, world,
                                                 {.communicator = options});
        body(*comm);
        if (!end_together) return;
        TcpStore own(server.address());
        wait_for_all(own, rank, world);
      },
      killed_rank);
}

class GlooSuite : public ::testing::TestWithParam<int> {};

TEST_P(GlooSuite, Passes) {
  EXPECT_EQ(run_gloo_ranks(GetParam(), [](Communicator& comm) { run_backend_suite(comm); }), "");
}

TEST_P(GlooSuite, FailsClearly) {
  if (GetParam() < 2) return;
  for (const SuiteCase& test : backend_failure_suite()) {
    SCOPED_TRACE(test.name);
    EXPECT_EQ(again_if_late([&] {
                return run_gloo_ranks(
                    GetParam(), [&](Communicator& comm) { test.run(comm); }, failure_options(test), /*killed_rank=*/-1,
                    /*end_together=*/true);
              }),
              "");
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, GlooSuite, ::testing::Values(1, 2, 3, 4, 8));

void require_words(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words)
    if (text.find(word) == std::string::npos) throw std::runtime_error("wrong error: " + text);
}

TEST(GlooBackend, SurvivorsNameTheRankThatWasKilledWithinASecond) {
  EXPECT_EQ(again_if_late([] {
              TcpStoreServer server;
              return kill_one_of(3, 1, [&](FaultRank& self) -> std::function<void()> {
                const auto comm = make_gloo_communicator(std::make_shared<TcpStore>(server.address()), self.rank(), 3);
                comm->barrier();
                return [comm, &self] {
                  at::Tensor x = at::full({300'000}, 1.0F);
                  const std::string text = self.error_within(seconds(1), [&] {
                    for (;;) comm->all_reduce(x);
                  });
                  require_words(text, {"rank 1 has died", "all_reduce(float32[300000], sum)", "group 'world'"});
                };
              });
            }),
            "");
}

// SIGPIPE has its default action, which would end the process.
TEST(GlooBackend, AWriteToADeadPeerEndsNoProcess) {
  EXPECT_EQ(again_if_late([] {
              TcpStoreServer server;
              return kill_one_of(2, 1, [&](FaultRank& self) -> std::function<void()> {
                signal(SIGPIPE, SIG_DFL);
                const auto comm = make_gloo_communicator(std::make_shared<TcpStore>(server.address()), self.rank(), 2);
                comm->barrier();
                return [comm, &self] {
                  at::Tensor x = at::full({300'000}, 1.0F);
                  require_words(self.error_within(seconds(1),
                                                  [&] {
                                                    for (;;) comm->broadcast(x);
                                                  }),
                                {"rank 1 has died"});
                  if (signal(SIGPIPE, SIG_DFL) != SIG_DFL) throw std::runtime_error("SIGPIPE belongs to the program");
                };
              });
            }),
            "");
}

TEST(GlooBackend, AForkedChildDestroysItsCopyAndDisturbsNobody) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks_or_threads(3,
                                        [&](int rank) {
                                          auto comm = make_gloo_communicator(
                                              std::make_shared<TcpStore>(server.address()), rank, 3);
                                          comm->barrier();
                                          destroy_in_child(comm);
                                          at::Tensor x = at::full({300'000}, 1.0F);
                                          comm->all_reduce(x);
                                          if (!x.eq(3).all().item<bool>()) throw std::runtime_error("a wrong sum");
                                          comm->split(0, rank)->barrier();  // over the store
                                        }),
            "");
}

// Descriptors of this process for which is_counted(fd) holds.
int count_descriptors(bool (*is_counted)(int fd)) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    count += is_counted(std::stoi(entry.path().filename())) ? 1 : 0;
  return count;
}
bool is_listening(int fd) {
  int listens = 0;
  socklen_t size = sizeof listens;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0;
}
bool is_socket(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode);
}

TEST(GlooBackend, AGroupHasTwoConnectionsWithEachPeerAndListensNowhere) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(
                3,
                [&](int rank) {
                  const auto comm = make_gloo_communicator(std::make_shared<TcpStore>(server.address()), rank, 3);
                  comm->barrier();
                  const int sockets = count_descriptors(is_socket), listening = count_descriptors(is_listening);
                  const auto again = comm->split(0, rank);
                  again->barrier();
                  if (const int more = count_descriptors(is_socket) - sockets; more != 4)
                    throw std::runtime_error(fmt::format("{} sockets more", more));
                  if (count_descriptors(is_listening) != listening || listening > 1)  // 1: the store's server
                    throw std::runtime_error("a socket listens");
                  comm->barrier();
                }),
            "");
}

TEST(GlooBackend, AKilledRankIsSeenInASplitAndByWhoeverSendsToIt) {
  EXPECT_EQ(again_if_late([] {
              TcpStoreServer server;
              return kill_one_of(4, 1, [&](FaultRank& self) -> std::function<void()> {
                const auto comm = make_gloo_communicator(std::make_shared<TcpStore>(server.address()), self.rank(), 4);
                // Old ranks 3, 1 and 2, 0: the victim is rank 1 of its pair.
                const std::shared_ptr<Communicator> pair = comm->split(comm->rank() % 2, -comm->rank());
                comm->barrier();
                return [comm, pair, &self] {
                  at::Tensor x = at::full({5}, 1.0F);
                  const bool is_with_victim = comm->rank() % 2 == 1;
                  for (int k = 0; k < 20 && !is_with_victim; ++k) pair->all_reduce(x);  // no rank of the pair has died
                  const std::string text = self.error_within(seconds(1), [&] {
                    if (!is_with_victim) comm->recv(x, 1);
                    for (;;) pair->all_reduce(x);
                  });
                  require_words(text, {"rank 1 has died"});
                };
              });
            }),
            "");
}

int thread_count() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

TEST(GlooBackend, OutstandingMessagesHaveNoThreads) {
  EXPECT_EQ(run_gloo_ranks(2,
                           [](Communicator& comm) {
                             at::Tensor x = at::full({1000}, 1.0F), y = at::full({1000}, 2.0F);
                             const int peer = 1 - comm.rank();
                             const auto exchange = [&](int count) {
                               std::vector<Work> works;
                               for (int i = 0; i < count; ++i)
                                 works.push_back(comm.recv(y.clone(), peer, {.tag = i, .async = true}));
                               const int threads = thread_count();
                               for (int i = 0; i < count; ++i)
                                 works.push_back(comm.send(x, peer, {.tag = i, .async = true}));
                               for (Work& work : works) work.wait();
                               return threads;
                             };
                             const int with_one = exchange(1), with_many = exchange(32);
                             if (with_many != with_one)
                               throw std::runtime_error(
                                   fmt::format("{} threads with one message, {} with 32", with_one, with_many));
                           }),
            "");
}

// Far below the heartbeat limit, and below the 100 ms after which a waiting rank asks the store: the peers' connections
// tell it.
TEST(GlooBackend, AnAbortReachesWaitingRanksAtOnce) {
  for (const bool in_collective : {false, true}) {
    SCOPED_TRACE(in_collective);
    EXPECT_EQ(again_if_late([&] {
                TcpStoreServer server;
                FaultWorld world(3, [&](FaultRank& self) {
                  const auto comm =
                      make_gloo_communicator(std::make_shared<TcpStore>(server.address()), self.rank(), 3);
                  comm->barrier();
                  at::Tensor x = at::full({300'000}, 1.0F);
                  std::vector<Work> receives;
                  for (int i = 0; i < 8 && !in_collective; ++i)
                    receives.push_back(comm->recv(x.clone(), (self.rank() + 1) % 3, {.tag = i, .async = true}));
                  self.arrive();
                  self.await_go(1);
                  if (self.rank() == 0) comm->abort("had enough");
                  const std::string text = self.error_within(milliseconds(60), [&] {
                    for (Work& work : receives) work.wait();
                    comm->all_reduce(x);
                  });
                  require_words(text, {"had enough"});
                });
                for (int rank = 0; rank < 3; ++rank) world.await(rank, 1);
                world.note_fault();
                world.go(1);
                return world.finish();
              }),
              "");
  }
}

// Rank 2 is stopped in the middle of the data, so neither it nor its connections move. Nobody waits for it.
TEST(GlooBackend, AnAbortEndsACollectiveWithAStoppedRankAtOnce) {
  EXPECT_EQ(again_if_late([&] {
              TcpStoreServer server;
              FaultWorld world(3, [&](FaultRank& self) {
                const int threads = thread_count();
                auto comm = make_gloo_communicator(std::make_shared<TcpStore>(server.address()), self.rank(), 3);
                at::Tensor x = at::full({4'000'000}, 1.0F);
                std::thread giving_up;
                if (self.rank() == 0)
                  giving_up = std::thread([&] {
                    self.await_go(1);
                    comm->abort("had enough");
                  });
                const std::string text = self.error_within(milliseconds(60), [&] {
                  for (;; self.arrive()) comm->all_reduce(x);
                });
                require_words(text, {"had enough"});
                if (giving_up.joinable()) giving_up.join();
                require_leaving_in_time(comm);
                if (thread_count() > threads) throw std::runtime_error("a thread is left");
              });
              for (int rank = 0; rank < 3; ++rank) world.await(rank, 1);
              world.send(2, SIGSTOP);
              // In this time the others come to wait for it.
              std::this_thread::sleep_for(milliseconds(200));
              world.note_fault();
              world.go(1);
              world.await_end(0);
              world.await_end(1);
              world.strike(2, SIGKILL);
              return world.finish();
            }),
            "");
}

// Of a byte that the transport may be writing. ThreadSanitizer would call it a race.
__attribute__((no_sanitize("thread"))) bool is_zero_meanwhile(const volatile char* byte) { return *byte == 0; }

// A thread aborts while data stream in, and the one that drives the operation notices and aborts, too. Once wait() has
// thrown, the memory is the caller's, whichever of the two came first.
void give_up_while_data_stream_in(Communicator& comm, bool in_collective) {
  constexpr std::int64_t kPart = 32 << 20;
  const auto group = comm.split(0, comm.rank());
  at::Tensor mine = at::full({kPart}, 1, at::kByte), all = at::full({2 * kPart}, 0, at::kByte);
  char* const arriving = static_cast<char*>(all.mutable_data_ptr());
  comm.barrier();
  Work work = in_collective      ? group->all_gather(all, mine, {.async = true})
              : comm.rank() == 0 ? group->recv(all.narrow(0, kPart, kPart), 1, {.async = true})
                                 : group->send(mine, 0, {.async = true});
  std::thread giving_up;
  if (comm.rank() == 0) {
    while (is_zero_meanwhile(arriving + kPart)) std::this_thread::yield();
    giving_up = std::thread([&] { group->abort("had enough"); });
  }
  try {
    work.wait();
  } catch (const CommError&) {
  }
  std::memset(arriving, 2, 2 * kPart);
  std::this_thread::sleep_for(milliseconds(2));
  const bool is_written = std::count(arriving, arriving + 2 * kPart, 2) != 2 * kPart;
  if (giving_up.joinable()) giving_up.join();
  if (is_written) throw std::runtime_error("memory was written after the error");
}

TEST(GlooBackend, NobodyWritesToTheMemoryOfAnOperationThatWasGivenUp) {
  EXPECT_EQ(run_gloo_ranks(2,
                           [](Communicator& comm) {
                             for (int round = 0; round < (kUnderSanitizer ? 6 : 30); ++round) {
                               give_up_while_data_stream_in(comm, round % 2 == 1);
                               comm.barrier();
                             }
                           }),
            "");
}

// A rank that ended in order does not count as dead for ranks that still read its data.
TEST(GlooBackend, RanksMayLeaveEarly) {
  EXPECT_EQ(run_gloo_ranks(3,
                           [](Communicator& comm) {
                             at::Tensor x = at::full({200'000}, 1.0F);
                             for (int k = 0; k < 5; ++k) comm.all_reduce(x);
                           }),
            "");
}

TEST(GlooBackend, RanksThatDoNotComeAreNamed) {
  TcpStoreServer server;
  try {
    make_gloo_communicator(std::make_shared<TcpStore>(server.address()), 0, 3,
                           {.communicator = {.first_timeout = std::chrono::milliseconds(50)}});
    FAIL();
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("of the 3 ranks of group 'world' these have not come within 0.05 s: 1, 2"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace phalanx
