// Symmetric memory: every verb on it against the same verb on ordinary tensors, which the suite checks in closed form;
// that the data do not go through the slots; and what happens if only some ranks use it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/gloo/gloo.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/comm/testing/verb_places.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

using RunRanks = std::string(int world, const std::function<void(int rank)>& body, int killed_rank);

std::string run_symmetric_ranks(int world, const std::function<void(Communicator&)>& body,
                                CommunicatorOptions options = {}, RunRanks& run = run_forked_ranks) {
  TcpStoreServer server;
  const auto rank_body = [&](int rank) {
    TcpStore store(server.address());
    body(*make_shm_communicator(store, rank, world, options));
  };
  return run(world, rank_body, -1);
}

void symmetric_suite(Communicator& comm) {
  const int world = comm.size();
  for (const c10::ScalarType type : {c10::ScalarType::Float, c10::ScalarType::BFloat16}) {
    // Below and above the size from which symmetric memory is used, and more than one step or the caches hold.
    for (const std::int64_t count : {5, 40'001, 700'003}) {
      if (count > 100'000 && (type != c10::ScalarType::Float || world > 2)) continue;
      const auto make = [&] { return comm.symmetric_empty({(count + 100) * world}, type); };
      const at::Tensor a = make();
      compare_verbs(comm, count, type, "all in one", [&](std::int64_t n) { return a.narrow(0, 0, n); });
      compare_verbs(comm, count, type, "at places of their own",
                    [&](std::int64_t n) { return a.narrow(0, 7 * comm.rank(), n); });
      if (count > 100'000) continue;
      const at::Tensor b = comm.symmetric_empty({(count + 100) * world}, type, {.keeps_peers_mapped = false});
      compare_verbs(comm, count, type, "left by its peers", [&](std::int64_t n) { return b.narrow(0, 5, n); });
      compare_verbs(comm, count, type, "in two",
                    [&](std::int64_t n) { return (comm.rank() % 2 == 0 ? a : b).narrow(0, 3, n); });
      compare_verbs(comm, count, type, "rank 0 only",
                    [&](std::int64_t n) { return comm.rank() == 0 ? a.narrow(0, 0, n) : at::empty({n}, a.options()); });
      compare_verbs(comm, count, type, "all but rank 0",
                    [&](std::int64_t n) { return comm.rank() != 0 ? a.narrow(0, 0, n) : at::empty({n}, a.options()); });
    }
  }
  // Several operations in flight, in windows that are made and destroyed.
  std::vector<Work> works;
  std::vector<at::Tensor> tensors;
  for (int k = 0; k < 6; ++k) {
    tensors.push_back(comm.symmetric_empty({300, 100}, at::kFloat).fill_(comm.rank() + k));
    works.push_back(comm.all_reduce(tensors.back(), {.async = true}));
    if (k % 2 == 0) works.push_back(comm.all_reduce(at::full({30'000}, 1.0F), {.async = true}));
  }
  for (Work& work : works) work.wait();
  for (int k = 0; k < 6; ++k)
    must_be(at::equal(tensors[static_cast<std::size_t>(k)],
                      at::full({300, 100}, static_cast<float>(world * (world - 1) / 2 + world * k))),
            fmt::format("window {}", k));
  must_be(comm.symmetric_empty({0}, at::kFloat).numel() == 0, "empty");
}

TEST(Symmetric, GivesTheSameOnEveryVerb) {
  for (const int world : {1, 2, 3, 4})
    EXPECT_EQ(run_symmetric_ranks(world, symmetric_suite, {}, run_forked_ranks_or_threads), "") << world << " ranks";
}

TEST(Symmetric, IsAnyTensorElsewhere) {
  run_local_ranks(2, [](const std::shared_ptr<Communicator>& comm) { symmetric_suite(*comm); });
}

TEST(Symmetric, NothingGoesThroughTheSlots) {
  EXPECT_EQ(run_symmetric_ranks(2,
                                [](Communicator& comm) {
                                  const std::uintptr_t segment = only_mapping();
                                  const at::Tensor x = comm.symmetric_empty({2'000'000}, at::kFloat).fill_(1);
                                  at::Tensor y = at::full({4'000'000}, 1.0F);
                                  const std::int64_t before = resident_kib(segment);
                                  comm.all_reduce(x);
                                  comm.all_gather(y, x);
                                  comm.broadcast(x);
                                  const std::int64_t direct = resident_kib(segment) - before;
                                  must_be(direct < 64, fmt::format("{} KiB of the slots were touched", direct));
                                  comm.all_reduce(y);  // for comparison
                                  const std::int64_t slots = resident_kib(segment) - before;
                                  must_be(slots > 1024, fmt::format("{} KiB of the slots, expected more", slots));
                                }),
            "");
}

// Unless its peers stay mapped, a process holds only the pages of its own part between collectives.
TEST(Symmetric, PeersLeaveThePageTables) {
  EXPECT_EQ(run_symmetric_ranks(3,
                                [](Communicator& comm) {
                                  constexpr std::int64_t kElements = 2'000'000;
                                  constexpr double kPartKib = kElements * 4 / 1024.0;
                                  for (const bool stay : {true, false}) {
                                    const at::Tensor x =
                                        comm.symmetric_empty({kElements}, at::kFloat, {.keeps_peers_mapped = stay});
                                    const at::Tensor y = at::empty({3 * kElements});
                                    for (int call = 0; call < 2; ++call) {
                                      x.fill_(comm.rank() + 10 * call);
                                      comm.all_gather(y, x);
                                      for (int r = 0; r < 3; ++r)
                                        must_be(at::equal(y.narrow(0, r * kElements, kElements),
                                                          at::full({kElements}, static_cast<float>(r + 10 * call))),
                                                fmt::format("call {}, from rank {}", call, r));
                                      const auto kib = static_cast<double>(
                                          resident_kib(reinterpret_cast<std::uintptr_t>(x.const_data_ptr())));
                                      const double expected = stay ? 3 * kPartKib : kPartKib;
                                      must_be(std::abs(kib - expected) < 256,
                                              fmt::format("{} KiB in memory, expected {}", kib, expected));
                                    }
                                  }
                                }),
            "");
}

TEST(Symmetric, NothingIsLeftOfATensorThatIsGone) {
  EXPECT_EQ(run_symmetric_ranks(3,
                                [](Communicator& comm) {
                                  const std::uintptr_t segment = only_mapping();
                                  {
                                    const at::Tensor x = comm.symmetric_empty({100'000}, at::kFloat).fill_(1);
                                    comm.all_reduce(x);
                                    const at::Tensor view = x.narrow(0, 5, 7);
                                  }
                                  must_be(only_mapping() == segment, "another mapping");
                                }),
            "");
}

// The window of a rank that has freed its tensor and ended still serves the others.
TEST(Symmetric, ATensorMayOutliveItsCommunicatorAndItsPeers) {
  EXPECT_EQ(run_forked_ranks(3,
                             [server = std::make_shared<TcpStoreServer>()](int rank) {
                               at::Tensor x;
                               {
                                 TcpStore store(server->address());
                                 const auto comm = make_shm_communicator(store, rank, 3);
                                 x = comm->symmetric_empty({100'000}, at::kFloat).fill_(rank);
                                 comm->all_reduce(x);
                                 comm->barrier();
                               }
                               must_be(at::equal(x, at::full({100'000}, 3.0F)), "the sum");
                             }),
            "");
}

TEST(Symmetric, DifferentRequestsAreAnErrorOnEveryRank) {
  EXPECT_EQ(run_symmetric_ranks(3,
                                [](Communicator& comm) {
                                  try {
                                    comm.symmetric_empty({comm.rank() == 1 ? 7 : 8, 2}, at::kFloat);
                                  } catch (const CommError& e) {
                                    for (const char* part : {"symmetric_empty", "Float[8, 2]", "rank 1: Float[7, 2]"})
                                      must_be(std::string(e.what()).find(part) != std::string::npos, e.what());
                                    return;
                                  }
                                  throw std::runtime_error("no error");
                                }),
            "");
}

TEST(Symmetric, WithoutMemoryEveryRankSaysSo) {
  EXPECT_EQ(run_symmetric_ranks(2,
                                [](Communicator& comm) {
                                  const rlimit small{1 << 20, 1 << 20};
                                  if (comm.rank() == 0) {
                                    signal(SIGXFSZ, SIG_IGN);
                                    setrlimit(RLIMIT_FSIZE, &small);
                                  }
                                  try {
                                    comm.symmetric_empty({1 << 20}, at::kFloat);
                                  } catch (const CommError& e) {
                                    must_be(std::string(e.what()).find("rank 0: shared memory is not available") !=
                                                std::string::npos,
                                            e.what());
                                    return;
                                  }
                                  throw std::runtime_error("no error");
                                }),
            "");
}

// After the failure the ranks wait until no peer writes into their tensors. That must not delay the error.
TEST(Symmetric, ARankThatDiesAtWorkOnItsPeersTensorsIsNamedWithinASecond) {
  constexpr int kVictim = 1;
  EXPECT_EQ(again_if_late([] {
              TcpStoreServer server;
              return run_forked_ranks(
                  3,
                  [&](int rank) {
                    TcpStore store(server.address());
                    const auto comm = make_shm_communicator(store, rank, 3);
                    const at::Tensor x = comm->symmetric_empty({30'000'000}, at::kFloat).fill_(1);
                    comm->barrier();
                    if (rank == kVictim) strike_at_work(*comm, x, SIGKILL);
                    const LoadedTime begin = LoadedTime::now();
                    try {
                      for (;;) comm->all_reduce(x);
                    } catch (const CommError& e) {
                      const std::string how_late = late(begin, 1s);
                      for (const char* part : {"rank 1 has died", "all_reduce(float32[30000000], sum)"})
                        must_be(std::string(e.what()).find(part) != std::string::npos, e.what());
                      must_be(how_late.empty(), "late: " + how_late);
                    }
                  },
                  kVictim);
            }),
            "");
}

// No rank checks whether the others live (heartbeat 0), so the operation's timeout ends it. The stopped rank, which
// might continue to write, is awaited for at most one more second.
TEST(Symmetric, ARankThatStopsAtWorkOnItsPeersTensorsDoesNotHoldThem) {
  constexpr int kVictim = 1;
  TcpStoreServer server;
  FaultWorld world(3, [&](FaultRank& self) {
    TcpStore store(server.address());
    const auto comm = make_shm_communicator(store, self.rank(), 3, {.timeout = 2s, .heartbeat = 0s});
    const at::Tensor x = comm->symmetric_empty({30'000'000}, at::kFloat).fill_(1);
    comm->barrier();
    comm->mark_started();
    outlasts_a_stopped_rank(*comm, x, self.rank() == kVictim);
  });
  for (const int rank : {0, 2}) EXPECT_TRUE(world.await_end(rank)) << "rank " << rank << " hangs";
  world.send(kVictim, SIGCONT);
  EXPECT_EQ(world.finish(), "");
}

}  // namespace
}  // namespace phalanx
