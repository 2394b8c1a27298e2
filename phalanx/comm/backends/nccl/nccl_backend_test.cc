// The backends for device tensors: nccl over a fake NCCL, and staging through host memory, both over fake streams. Runs
// the suite with ranks as threads and as processes, and tests what only these have: streams, groups, abort.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local_backend.h"
#include "phalanx/comm/backends/local_shm/shm_backend.h"
#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/backends/nccl/nccl_communicator.h"
#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/expect_failure_suite.h"
#include "phalanx/comm/testing/fake_nccl.h"
#include "phalanx/comm/testing/fake_streams.h"
#include "phalanx/comm/testing/fault_calls.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/comm/testing/nccl_ranks.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

// A rank that is a process.
std::shared_ptr<NcclRank> make_nccl_rank(const HostPort& server, int rank, int world, const NcclOptions& options = {},
                                         std::chrono::milliseconds heartbeat = kDefaultHeartbeat) {
  TcpStore store(server);
  auto made = std::make_shared<NcclRank>();
  made->nccl = std::make_shared<FakeNccl>(make_shm_backend(store, rank, world, "transport", 60s, 0s));
  made->comm = make_nccl_communicator(make_shm_backend(store, rank, world, "control", 60s, heartbeat), -1,
                                      made->nccl->table(), made->streams, options);
  return made;
}

void end_nccl_rank(NcclRank& rank) {
  rank.comm.reset();
  if (rank.nccl->misuses() != 0) throw std::runtime_error("NCCL was called in a way that it does not allow");
}

std::string run_nccl_processes(int world, const NcclBody& body, const NcclOptions& options = {}) {
  TcpStoreServer server;
  return run_forked_ranks(world, [&](int r) {
    const auto rank = make_nccl_rank(server.address(), r, world, options);
    body(*rank);
    end_nccl_rank(*rank);
  });
}

void run_whole_suite(NcclRank& rank) {
  run_backend_suite(*rank.comm, [](const SuiteCase& test) { return !test.needs_rank_order; });
}

using NcclRanks = std::function<std::string(int world, const NcclBody& body, const NcclOptions& options)>;

NcclOptions with_strictness(CommunicatorOptions options, bool strict) {
  options.strict = strict;
  return {.communicator = std::move(options)};
}

void expect_clear_failures(int world, const NcclRanks& run_ranks) {
  for (const bool strict : {false, true}) {
    for (const SuiteCase& test : backend_failure_suite()) {
      // Compared asynchronously: a rank whose own part is right learns of the mismatch after the call.
      if (!strict && std::string_view(test.name) == "counts") continue;
      SCOPED_TRACE(fmt::format("{}{}", test.name, strict ? ", strict" : ""));
      EXPECT_EQ(again_if_late([&] {
                  return run_ranks(
                      world, [&](NcclRank& rank) { test.run(*rank.comm); },
                      with_strictness(failure_options(test), strict));
                }),
                "");
    }
  }
}

class NcclSuite : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, NcclSuite, ::testing::Values(1, 2, 3, 4, 8));

TEST_P(NcclSuite, Passes) { EXPECT_EQ(run_nccl_threads(GetParam(), run_whole_suite), ""); }

TEST_P(NcclSuite, FailsClearly) {
  if (GetParam() == 1) return;
  expect_clear_failures(GetParam(), [](int world, const NcclBody& body, const NcclOptions& options) {
    return run_nccl_threads(world, body, options);
  });
}

TEST(NcclBackend, StrictPassesTheSuiteToo) {
  EXPECT_EQ(run_nccl_threads(3, run_whole_suite, {.communicator = {.strict = true}}), "");
}

class NcclProcesses : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, NcclProcesses, ::testing::Values(2, 3, 4, 8));

TEST_P(NcclProcesses, PassTheSuite) { EXPECT_EQ(run_nccl_processes(GetParam(), run_whole_suite), ""); }

TEST(NcclBackend, ProcessesFailClearly) {
  for (const int world : {2, 4}) expect_clear_failures(world, run_nccl_processes);
}

// Each call has a separate world: a stream that waits in vain blocks everything behind it.
class NcclDeaths : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Calls, NcclDeaths, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "strict" : "behind_the_stream"; });

constexpr std::int64_t kDeathCount = 300'000;

// Repeats the call until it fails; the error must name the call.
void call_until_told(FaultRank& self, NcclRank& rank, const FaultCall& call, std::chrono::milliseconds bound,
                     const std::string& words) {
  const std::string text = self.error_within(bound, [&] {
    for (;;) call.begin(*rank.comm, kDeathCount)();
  });
  require_told(call, text, kDeathCount, 1);
  for (const std::string& part : {words, std::string("group 'world'")})
    if (text.find(part) == std::string::npos) throw std::runtime_error(call.name + ": wrong error: " + text);
}

void expect_death_is_told(int world, const FaultCall& call, bool strict, bool nccl_notices = false) {
  EXPECT_EQ(again_if_late([&] {
              TcpStoreServer server;
              return kill_one_of(world, 1, [&](FaultRank& self) -> std::function<void()> {
                const auto rank =
                    make_nccl_rank(server.address(), self.rank(), world, {.communicator = {.strict = strict}});
                rank->comm->barrier();
                return [&, rank] {
                  if (nccl_notices) rank->nccl->fail_with(NcclResult::remote_error);
                  call_until_told(self, *rank, call, 1s, "rank 1 has died");
                  end_nccl_rank(*rank);
                };
              });
            }),
            "")
      << call.name << ", " << world << " ranks";
}

TEST_P(NcclDeaths, SurvivorsNameTheRankThatWasKilledWithinASecond) {
  for (const FaultCall& call : fault_calls(1)) {
    if (call.prepare) continue;  // symmetric memory is shm's
    expect_death_is_told(3, call, GetParam());
  }
}

TEST_P(NcclDeaths, AtOtherNumbersOfRanksToo) {
  for (const int world : {2, 4, 8}) expect_death_is_told(world, fault_calls(1).front(), GetParam());
}

// NCCL, whose sockets break at once, may detect the death first, but not which rank it was.
TEST_P(NcclDeaths, TheDeadRankIsNamedWhereNcclNoticesFirst) {
  expect_death_is_told(3, fault_calls(1).front(), GetParam(), /*nccl_notices=*/true);
}

TEST_P(NcclDeaths, AStoppedRankIsToldWithinTheHeartbeatLimit) {
  EXPECT_EQ(again_if_late([&] {
              TcpStoreServer server;
              const FaultCall call = fault_calls(1).front();
              FaultWorld world(3, [&](FaultRank& self) {
                const auto rank =
                    make_nccl_rank(server.address(), self.rank(), 3, {.communicator = {.strict = GetParam()}}, 1500ms);
                rank->comm->barrier();
                self.arrive();
                if (self.rank() == 1) self.await_go(1);
                // Continued, the rank learns that the others have given it up.
                call_until_told(self, *rank, call, self.rank() == 1 ? 60s : 1500ms, "rank 1 is stopped (SIGSTOP)");
                end_nccl_rank(*rank);
              });
              for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(world.await(rank, 1));
              world.strike(1, SIGSTOP);
              for (const int rank : {0, 2}) EXPECT_TRUE(world.await_end(rank)) << rank;
              world.go(1);
              world.send(1, SIGCONT);
              return world.finish();
            }),
            "");
}

// --- streams

// A gate that a stream waits for until it is opened.
class Gate {
 public:
  void close_on(DeviceStream stream) {
    FakeStreams::enqueue(stream, [this] {
      while (!open_.load()) std::this_thread::yield();
    });
  }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_{false};
};

TEST(NcclBackend, TheHostWaitsForNothingAndTheStreamsForEachOther) {
  EXPECT_EQ(run_nccl_threads(2,
                             [](NcclRank& rank) {
                               Gate gate;
                               const DeviceStream compute = rank.streams->make_stream();
                               FakeStreams::use(compute);
                               at::Tensor x = at::full({1000}, -1.0F);
                               at::Tensor y = at::full({1000}, -1.0F);
                               // The value is computed only when the gate opens, long after the verbs have returned.
                               gate.close_on(compute);
                               FakeStreams::enqueue(compute, [&] { x.fill_(rank.comm->rank() + 1.0F); });
                               rank.comm->all_reduce(x);
                               FakeStreams::enqueue(compute, [&] { y.copy_(x); });
                               Work work = rank.comm->all_reduce(y, {.async = true});
                               EXPECT_FALSE(work.is_done());
                               work.wait();
                               FakeStreams::enqueue(compute, [&] { y.mul_(2); });
                               EXPECT_EQ(x.const_data_ptr<float>()[0], -1.0F);  // nothing has happened yet
                               gate.open();
                               const auto end = rank.streams->record(compute);
                               FakeStreams::use(nullptr);
                               rank.streams->current_waits(*end);
                               EXPECT_EQ(x.const_data_ptr<float>()[999], 3.0F);
                               EXPECT_EQ(y.const_data_ptr<float>()[999], 12.0F);
                               EXPECT_TRUE(work.is_done());
                             }),
            "");
}

TEST(NcclBackend, MessagesBetweenHostsGoPastTheDevice) {
  EXPECT_EQ(run_nccl_threads(2,
                             [](NcclRank& rank) {
                               EXPECT_FALSE(rank.comm->backend()->traits().has_tags);
                               const int me = rank.comm->rank(), peer = 1 - me;
                               // The second is received first: the control backend has tags.
                               std::vector<Work> sent;
                               for (const int number : {0, 1})
                                 sent.push_back(rank.comm->send(at::full({2}, 10.0F * number + me), peer,
                                                                {.tag = kHostMemoryTag + number, .async = true}));
                               for (const int number : {1, 0}) {
                                 const at::Tensor x = at::empty({2});
                                 rank.comm->recv(x, peer, {.tag = kHostMemoryTag + number});
                                 EXPECT_EQ(x[1].item<float>(), 10.0F * number + peer);
                               }
                               for (const Work& work : sent) work.wait();
                               EXPECT_THAT(rank.nccl->calls(), ElementsAre("init"));
                             }),
            "");
}

TEST(NcclBackend, TensorsLiveUntilTheDeviceIsThrough) {
  EXPECT_EQ(run_nccl_threads(2,
                             [](NcclRank& rank) {
                               Gate gate;
                               const DeviceStream compute = rank.streams->make_stream();
                               FakeStreams::use(compute);
                               gate.close_on(compute);
                               std::atomic<bool> freed{false};
                               {
                                 auto* data = new float[1000];
                                 at::Tensor x = at::from_blob(
                                     data, {1000},
                                     [&freed](void* memory) {
                                       freed = true;
                                       delete[] static_cast<float*>(memory);
                                     },
                                     at::kFloat);
                                 rank.comm->all_reduce(x);
                               }
                               EXPECT_FALSE(freed.load());
                               gate.open();
                               FakeStreams::use(nullptr);
                               rank.comm->barrier();  // behind it in the queue
                               EXPECT_TRUE(freed.load());
                             }),
            "");
}

// A mismatch is found asynchronously: the device is freed, and a later call reports what was wrong (or the verb itself,
// if the comparison was quicker than its return).
TEST(NcclBackend, AMismatchFreesTheStreamsAndIsTheErrorOfALaterCall) {
  EXPECT_EQ(run_nccl_threads(2,
                             [](NcclRank& rank) {
                               const DeviceStream compute = rank.streams->make_stream();
                               FakeStreams::use(compute);
                               at::Tensor x = at::full({rank.comm->rank() + 5}, 1.0F);
                               std::string text;
                               try {
                                 rank.comm->all_reduce(x);
                                 for (;;) rank.comm->barrier();
                               } catch (const CommError& error) {
                                 text = error.what();
                               }
                               EXPECT_THAT(text, HasSubstr("rank 0: all_reduce(float32[5], sum)"));
                               EXPECT_THAT(text, HasSubstr("rank 1: all_reduce(float32[6], sum)"));
                               const auto end = rank.streams->record(compute);
                               FakeStreams::use(nullptr);
                               rank.streams->current_waits(*end);  // would hang if the kernel were not ended
                               // The comparison may be quicker than the launch, too.
                               EXPECT_THAT(rank.nccl->calls(), AnyOf(ElementsAre("init", "all_reduce", "abort"),
                                                                     ElementsAre("init", "abort")));
                             }),
            "");
}

// --- how verbs map to NCCL calls

TEST(NcclBackend, VerbsThatNcclLacksAreGroups) {
  EXPECT_EQ(run_nccl_threads(
                3,
                [](NcclRank& rank) {
                  Communicator& comm = *rank.comm;
                  const bool is_root = comm.rank() == 0;
                  at::Tensor one = at::full({2}, 1.0F), all = at::full({6}, 1.0F), out = at::full({6}, 1.0F);
                  comm.gather(is_root ? all : at::Tensor(), one);
                  comm.scatter(one, is_root ? all : at::Tensor());
                  comm.all_to_all(out, all);
                  comm.all_gather_uneven(at::full({5}, 0.0F),
                                         at::full({comm.rank() == 1 ? 0 : 2 + comm.rank() / 2}, 1.0F), {2, 0, 3});
                  comm.batch_isend_irecv(
                      {{true, one, (comm.rank() + 1) % 3, 4}, {false, out.narrow(0, 0, 2), (comm.rank() + 2) % 3, 4}});
                  comm.barrier();
                  comm.all_gather_bytes("host memory");
                  const int r = comm.rank(), before = (r + 2) % 3, after = (r + 1) % 3;
                  const int low = std::min(before, after), high = std::max(before, after);
                  EXPECT_THAT(rank.nccl->calls(),
                              ElementsAre("init", is_root ? "group(recv 1, recv 2)" : "group(send 0)",
                                          is_root ? "group(send 1, send 2)" : "group(recv 0)",
                                          fmt::format("group(send {0}, recv {0}, send {1}, recv {1})", low, high),
                                          "group(broadcast, broadcast)",
                                          fmt::format("group(send {}, recv {})", after, before)));
                }),
            "");
}

TEST(NcclBackend, CommunicatorsAreSplitByNccl) {
  EXPECT_EQ(run_nccl_threads(3,
                             [](NcclRank& rank) {
                               auto pair = rank.comm->split(rank.comm->rank() == 1 ? -1 : 0, -rank.comm->rank());
                               if (pair) {
                                 EXPECT_EQ(pair->rank(), rank.comm->rank() == 2 ? 0 : 1);
                                 at::Tensor x = at::full({3}, 1.0F + rank.comm->rank());
                                 pair->broadcast(x, {.root = 0});
                                 EXPECT_EQ(x.const_data_ptr<float>()[0], 3.0F);
                                 pair.reset();
                                 EXPECT_THAT(rank.nccl->calls(),
                                             ElementsAre("init", "split", "broadcast", "finalize", "destroy"));
                               } else {
                                 EXPECT_THAT(rank.nccl->calls(), ElementsAre("init", "split"));
                               }
                             }),
            "");
}

// --- a group's first calls, which NCCL takes when all ranks have made them

TEST(NcclBackend, TheHostDoesNotWaitForRanksThatComeLater) {
  for (const bool strict : {false, true}) {
    std::atomic<bool> has_returned{false};
    EXPECT_EQ(run_nccl_threads(2,
                               [&](NcclRank& rank) {
                                 at::Tensor x = at::full({4}, rank.comm->rank() + 1.0F), y = at::full({4}, 2.0F);
                                 const auto begin = std::chrono::steady_clock::now();
                                 while (rank.comm->rank() == 1 && !has_returned &&
                                        std::chrono::steady_clock::now() - begin < 10s)
                                   std::this_thread::yield();
                                 const Work first = rank.comm->all_reduce(x, {.async = true});
                                 const Work second =
                                     rank.comm->all_reduce(y, {.async = true});  // behind one that NCCL has not taken
                                 if (rank.comm->rank() == 0) {
                                   EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
                                   EXPECT_FALSE(first.is_done());
                                   has_returned = true;
                                 }
                                 first.wait();
                                 second.wait();
                                 EXPECT_EQ(x.const_data_ptr<float>()[3], 3.0F);
                                 EXPECT_EQ(y.const_data_ptr<float>()[3], 4.0F);
                               },
                               {.communicator = {.strict = strict}}),
              "");
  }
}

TEST(NcclBackend, TwoGroupsMayBeUsedInOppositeOrder) {
  EXPECT_EQ(run_nccl_threads(2,
                             [](NcclRank& rank) {
                               const auto one = rank.comm->split(0, 0), other = rank.comm->split(0, 0);
                               const bool is_first = rank.comm->rank() == 0;
                               at::Tensor x = at::full({4}, 1.0F), y = at::full({4}, 2.0F);
                               const Work a = (is_first ? one : other)->all_reduce(is_first ? x : y, {.async = true});
                               const Work b = (is_first ? other : one)->all_reduce(is_first ? y : x, {.async = true});
                               a.wait();
                               b.wait();
                               EXPECT_EQ(x.const_data_ptr<float>()[3], 2.0F);
                               EXPECT_EQ(y.const_data_ptr<float>()[3], 4.0F);
                             }),
            "");
}

// NCCL stores the result of a split when it completes, even if no thread waits for it any more.
TEST(NcclBackend, ASplitThatFailsIsEndedBeforeItsMemoryIs) {
  const auto transport = make_local_backends(2);
  std::vector<std::unique_ptr<FakeNccl>> libraries;
  for (const auto& way : transport) libraries.push_back(std::make_unique<FakeNccl>(way));
  const auto streams = std::make_shared<FakeStreams>();
  std::vector<std::shared_ptr<NcclCommunicator>> groups;
  for (int rank = 0; rank < 2; ++rank) {
    const auto table = libraries[static_cast<std::size_t>(rank)]->table();
    NcclUniqueId id{};
    table->get_unique_id(&id);
    groups.push_back(NcclCommunicator::make({table, streams, 200ms}, id, 2, rank));
  }
  EXPECT_THAT(error_text<CommError>([&] { groups.front()->split(0, 0); }),
              HasSubstr("split is not finished after 0.2 s"));
  EXPECT_TRUE(groups.front()->is_aborted());
  groups.clear();
  EXPECT_THAT(libraries.front()->calls(), ElementsAre("init", "split", "abort", "split given up"));
}

// A call may have begun when another thread aborts the group: the reason must not be lost on the way.
TEST(NcclBackend, ACallOfAnAbortedGroupNamesTheReason) {
  const auto transport = make_local_backends(1);
  FakeNccl library(transport.front());
  const auto table = library.table();
  NcclUniqueId id{};
  table->get_unique_id(&id);
  const auto group = NcclCommunicator::make({table, std::make_shared<FakeStreams>(), 200ms}, id, 1, 0);
  group->abort("rank 2 of group 'world': out of luck");
  group->abort("a later reason");
  const auto told = [](const std::function<void()>& call) { return error_text<CommError>([&] { call(); }); };
  const auto reason = HasSubstr(": the group was aborted: rank 2 of group 'world': out of luck");
  EXPECT_THAT(told([&] { group->begin("recv", [](NcclComm*) { return NcclResult::success; }); }), reason);
  EXPECT_THAT(told([&] { group->is_enqueued(); }), reason);
  EXPECT_THAT(told([&] { group->split(0, 0); }), reason);
}

TEST(NcclBackend, MessagesMatchInOrderAndTheirTagsMustAgree) {
  EXPECT_EQ(run_nccl_threads(2,
                             [](NcclRank& rank) {
                               at::Tensor x = at::full({4}, 1.0F);
                               EXPECT_THAT(error_text<CommError>([&] {
                                             if (rank.comm->rank() == 0)
                                               rank.comm->send(x, 1, {.tag = 7});
                                             else
                                               rank.comm->recv(x, 0, {.tag = 8});
                                             rank.comm->barrier();
                                           }),
                                           HasSubstr("under tag 7 and rank 1 receives float32[4] under "
                                                     "tag 8: nccl matches the messages"));
                             }),
            "");
}

// --- staged

// body(rank) on a thread for each rank, over the local backend.
std::string run_staged_threads(int world, const NcclBody& body, const CommunicatorOptions& options = {}) {
  const auto host = make_local_backends(world);
  std::mutex mutex;
  std::string failures;
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < host.size(); ++r) {
    threads.emplace_back([&, r] {
      NcclRank rank;
      rank.comm = std::make_shared<Communicator>(make_staged_backend(host[r], -1, rank.streams), options);
      try {
        body(rank);
      } catch (const std::exception& error) {
        rank.comm->abort(error.what());
        const std::lock_guard lock(mutex);
        failures += fmt::format("rank {}: {}\n", r, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

class StagedSuite : public ::testing::TestWithParam<int> {};

TEST_P(StagedSuite, Passes) {
  EXPECT_EQ(run_staged_threads(GetParam(),
                               [](NcclRank& rank) {
                                 for (const SuiteCase& test : backend_suite()) test.run(*rank.comm);
                               }),
            "");
}

TEST_P(StagedSuite, FailsClearly) {
  if (GetParam() < 2) return;
  expect_failure_suite([](const auto& body, const CommunicatorOptions& options) {
    return run_staged_threads(
        GetParam(), [&](NcclRank& rank) { body(*rank.comm); }, options);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, StagedSuite, ::testing::Values(1, 3));

TEST(StagedBackend, WaitsForTheComputeStreamAndTheComputeStreamForIt) {
  EXPECT_EQ(run_staged_threads(2,
                               [](NcclRank& rank) {
                                 Gate gate;
                                 const DeviceStream compute = rank.streams->make_stream();
                                 FakeStreams::use(compute);
                                 at::Tensor x = at::full({1000}, -1.0F);
                                 gate.close_on(compute);
                                 FakeStreams::enqueue(compute, [&] { x.fill_(rank.comm->rank() + 1.0F); });
                                 const Work work = rank.comm->all_reduce(x, {.async = true});
                                 EXPECT_FALSE(work.is_done());
                                 gate.open();
                                 work.wait();
                                 FakeStreams::enqueue(compute, [&] { x.mul_(2); });
                                 const auto end = rank.streams->record(compute);
                                 FakeStreams::use(nullptr);
                                 rank.streams->current_waits(*end);
                                 EXPECT_EQ(x.const_data_ptr<float>()[999], 6.0F);
                               }),
            "");
}

// Also those that have not begun on the host: nobody waits for the end of their turn.
TEST(StagedBackend, AnAbortEndsAllThatIsQueued) {
  const auto start = std::chrono::steady_clock::now();
  const std::string failures = run_staged_threads(2, [](NcclRank& rank) {
    if (rank.comm->rank() == 1) throw std::runtime_error("gives up");
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 5; ++i)
      works.push_back(rank.comm->all_reduce(tensors.emplace_back(at::full({1000}, 1.0F)), {.async = true}));
    for (Work& work : works) EXPECT_THROW(work.wait(), CommError);
  });
  EXPECT_EQ(failures, "rank 1: gives up\n");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));  // the time-out: 100 s
}

// Whichever the progress thread sees first in pinned memory.
TEST(StagedBackend, MessagesWithOneTagMatchInTheOrderOfIssue) {
  constexpr std::int64_t kMessages = 500, kCount = 512;
  EXPECT_EQ(run_staged_threads(2,
                               [](NcclRank& rank) {
                                 const bool is_sender = rank.comm->rank() == 0;
                                 std::vector<at::Tensor> tensors;
                                 std::vector<Work> works;
                                 for (std::int64_t i = 0; i < kMessages; ++i) {
                                   at::Tensor& x = tensors.emplace_back(at::full({kCount}, is_sender ? i : -1.0));
                                   works.push_back(is_sender ? rank.comm->send(x, 1, {.async = true})
                                                             : rank.comm->recv(x, 0, {.async = true}));
                                 }
                                 for (Work& work : works) work.wait();
                                 for (std::int64_t i = 0; i < kMessages; ++i)
                                   ASSERT_EQ(tensors[static_cast<std::size_t>(i)].const_data_ptr<float>()[kCount - 1],
                                             static_cast<float>(i));
                               }),
            "");
}

// --- NCCL's own failures

TEST(NcclBackend, WhatNcclReportsIsAnError) {
  EXPECT_EQ(run_nccl_threads(2,
                             [](NcclRank& rank) {
                               at::Tensor x = at::full({4}, 1.0F);
                               rank.comm->all_reduce(x);
                               rank.comm->barrier();
                               if (rank.comm->rank() == 0) rank.nccl->fail_with(NcclResult::remote_error);
                               try {
                                 for (;;) rank.comm->all_reduce(x);
                               } catch (const CommError& error) {
                                 EXPECT_THAT(error.what(), HasSubstr("remote process exited or there was a network "
                                                                     "error (socket closed)"));
                               }
                             }),
            "");
}

TEST(NcclBackend, RanksThatNcclCannotConnectTimeOut) {
  const auto control = make_local_backends(1);
  FakeNccl nccl(make_local_backends(1).front());
  nccl.never_connect();
  EXPECT_THAT(error_text<CommError>([&] {
                make_nccl_communicator(control.front(), -1, nccl.table(), std::make_shared<FakeStreams>(),
                                       {.communicator = {.first_timeout = 100ms}});
              }),
              HasSubstr("making the group is not finished after 0.1 s"));
  EXPECT_THAT(nccl.calls(), ElementsAre("init", "abort"));
}

// NCCL takes ranks with different NCCL_HOSTID for ranks of different nodes, and so asks no more of their devices.
TEST(NcclBackend, RanksOnOneDeviceMayBeOfDifferentHosts) {
  const std::string same = "GPU-00";
  const auto run = [&](bool differ) {
    TcpStoreServer server;
    return run_forked_ranks(2, [&](int rank) {
      ::setenv("NCCL_HOSTID", differ && rank == 1 ? "second" : "first", /*overwrite=*/1);
      TcpStore store(server.address());
      const auto streams = std::make_shared<FakeStreams>();
      streams->identify(same);
      FakeNccl nccl(make_shm_backend(store, rank, 2, "transport", 60s, 0s));
      const auto comm = make_nccl_communicator(make_shm_backend(store, rank, 2, "control", 60s, kDefaultHeartbeat), -1,
                                               nccl.table(), streams, {});
      if (comm->size() != 2) throw std::runtime_error("two ranks expected");
      // No rank ends while the other one is at its last step of making the group.
      store.set("made." + std::to_string(rank), "");
      store.wait({"made.0", "made.1"});
    });
  };
  EXPECT_EQ(run(true), "");
  EXPECT_THAT(run(false), HasSubstr("ranks 0 and 1 have the same device (GPU-00 of host first)"));
}

TEST(NcclBackend, RanksOnOneDeviceAreToldBeforeNcclIsAsked) {
  const auto control = make_local_backends(3);
  std::vector<std::thread> threads;
  for (const auto& backend : control)
    threads.emplace_back([&backend] {
      const auto streams = std::make_shared<FakeStreams>();
      streams->identify(backend->rank() == 1 ? "GPU-01" : "GPU-00");
      FakeNccl nccl(backend);
      EXPECT_THAT(error_text<NcclUnavailable>([&] { make_nccl_communicator(backend, -1, nccl.table(), streams, {}); }),
                  HasSubstr("ranks 0 and 2 have the same device (GPU-00)"));
      EXPECT_THAT(nccl.calls(), ElementsAre());
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace phalanx
