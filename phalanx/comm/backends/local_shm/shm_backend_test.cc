// The shm backend across real processes: the suite, deaths, and nothing left behind.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/expect_failure_suite.h"
#include "phalanx/comm/testing/fault_world.h"
#include "phalanx/comm/testing/forked_ranks.h"
#include "phalanx/store/hash_store.h"
#include "phalanx/store/tcp_store.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

// body(comm) in `world` processes.
std::string run_shm_ranks(int world, const std::function<void(Communicator&)>& body, CommunicatorOptions options = {},
                          int killed_rank = -1) {
  TcpStoreServer server;
  return run_forked_ranks_or_threads(
      world,
      [&](int rank) {
        TcpStore store(server.address());
        body(*make_shm_communicator(store, rank, world, options));
      },
      killed_rank);
}

class ShmSuite : public ::testing::TestWithParam<int> {};

TEST_P(ShmSuite, Passes) {
  EXPECT_EQ(run_shm_ranks(GetParam(), [](Communicator& comm) { run_backend_suite(comm); }), "");
}

TEST_P(ShmSuite, FailsClearly) {
  if (GetParam() < 2) return;
  expect_failure_suite(
      [](const auto& body, const CommunicatorOptions& options) { return run_shm_ranks(GetParam(), body, options); });
}

TEST(ShmBackend, TenThousandSmallAsynchronousOperationsOverTwoCommunicators) {
  EXPECT_EQ(run_shm_ranks(2, suite_async_soak), "");
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmSuite, ::testing::Values(1, 2, 3, 4, 8));

TEST(ShmBackend, SurvivorsNameTheRankThatWasKilledWithinASecond) {
  constexpr int kWorld = 4;
  constexpr int kVictim = 2;
  EXPECT_EQ(again_if_late([] {
              return run_shm_ranks(
                  kWorld,
                  [](Communicator& comm) {
                    // In the middle of an operation: its signature has been seen, its data have not all been moved.
                    at::Tensor x = at::full({3'000'000}, 1.0F);
                    if (comm.rank() == kVictim) {
                      Work work = comm.all_reduce(x, {.async = true});
                      while (true) {
                        if (x.const_data_ptr<float>()[0] != 1.0F) kill(getpid(), SIGKILL);
                        if (work.is_done()) kill(getpid(), SIGKILL);
                      }
                    }
                    LoadedTime begin;
                    try {
                      for (;;) {
                        begin = LoadedTime::now();
                        comm.all_reduce(x);
                      }
                    } catch (const CommError& e) {
                      const std::string how_late = late(begin, 1s);
                      const std::string text = e.what();
                      for (const char* part : {"rank 2 has died", "all_reduce(float32[3000000], sum)", "group 'world'"})
                        if (text.find(part) == std::string::npos) throw std::runtime_error("wrong error: " + text);
                      if (!how_late.empty()) throw std::runtime_error("late: " + how_late);
                    }
                  },
                  {}, kVictim);
            }),
            "");
}

TEST(ShmBackend, AKilledRankIsSeenByThoseWhoSendToItAndByAsynchronousWork) {
  EXPECT_EQ(again_if_late([] {
              TcpStoreServer server;
              return kill_one_of(3, 1, [&](FaultRank& self) -> std::function<void()> {
                TcpStore store(server.address());
                const auto comm = make_shm_communicator(store, self.rank(), 3);
                comm->barrier();
                return [comm, &self] {
                  at::Tensor x = at::full({5}, 1.0F);
                  const std::string text = self.error_within(1s, [&] {
                    if (comm->rank() == 0)
                      for (;;) comm->send(x, 1);
                    else
                      comm->all_reduce(x, {.async = true}).wait();
                  });
                  if (text.find("rank 1 has died") == std::string::npos) throw std::runtime_error(text);
                };
              });
            }),
            "");
}

// A rank that ended in order does not count as dead for ranks that still read its data.
TEST(ShmBackend, RanksMayLeaveEarly) {
  EXPECT_EQ(run_shm_ranks(4,
                          [](Communicator& comm) {
                            at::Tensor x = at::full({200'000}, 1.0F);
                            for (int k = 0; k < 5; ++k) comm.all_reduce(x);
                          }),
            "");
}

TEST(ShmBackend, NothingAppearsInDevShm) {
  const auto all_names = [] {  // other programs' too
    std::vector<std::string> found;
    if (std::filesystem::exists("/dev/shm"))
      for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
        if (entry.path().filename().string().find("phalanx") != std::string::npos) found.push_back(entry.path());
    return found;
  };
  const std::vector<std::string> before = all_names();
  const auto names = [&] {
    std::vector<std::string> found = all_names();
    std::erase_if(found, [&](const std::string& name) { return std::ranges::find(before, name) != before.end(); });
    return found;
  };
  EXPECT_EQ(run_shm_ranks(2,
                          [&](Communicator& comm) {
                            if (!names().empty()) throw std::runtime_error(names().front());
                            comm.barrier();
                          }),
            "");
  EXPECT_THAT(names(), IsEmpty());
}

TEST(ShmBackend, NoDescriptorsAreKeptButOneForEachPeer) {
  const auto count = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(3,
                             [&](int rank) {
                               TcpStore store(server.address());
                               const auto comm = make_shm_communicator(store, rank, 3);
                               const auto before = count();
                               auto a = comm->split(0, 0);
                               auto b = a->split(0, 0);
                               if (count() != before) throw std::runtime_error("a split keeps descriptors open");
                             }),
            "");
}

TEST(ShmBackend, AForkedChildDestroysItsCopyAndDisturbsNobody) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks_or_threads(3,
                                        [&](int rank) {
                                          TcpStore store(server.address());
                                          auto comm = make_shm_communicator(store, rank, 3);
                                          at::Tensor x = at::full({300'000}, 1.0F);
                                          comm->all_reduce(x, {.async = true}).wait();  // it has a progress thread
                                          destroy_in_child(comm);
                                          comm->all_reduce(x, {.async = true}).wait();
                                          if (!x.eq(9).all().item<bool>()) throw std::runtime_error("a wrong sum");
                                          comm->split(0, rank)->barrier();
                                        }),
            "");
}

// The progress thread of the parent is not in the child.
TEST(ShmBackend, AForkedChildMakesGroupsOfItsOwn) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(2,
                             [&](int rank) {
                               TcpStore store(server.address());
                               const auto comm = make_shm_communicator(store, rank, 2);
                               at::Tensor x = at::full({4}, 1.0F);
                               comm->all_reduce(x, {.async = true}).wait();
                               const pid_t child = fork();
                               if (child == 0) {
                                 alarm(20);
                                 PrefixStore childs(std::make_shared<TcpStore>(server.address()), "children");
                                 const auto inner = make_shm_communicator(childs, rank, 2);
                                 inner->all_reduce(x, {.async = true}).wait();
                                 _exit(x.eq(4).all().item<bool>() ? 0 : 1);
                               }
                               int status = 0;
                               waitpid(child, &status, 0);
                               if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                                 throw std::runtime_error("the children's sum failed");
                             }),
            "");
}

TEST(ShmBackend, WithoutSharedMemoryEveryRankSaysSo) {
  TcpStoreServer server;
  EXPECT_EQ(run_forked_ranks(2,
                             [&](int rank) {
                               TcpStore store(server.address());
                               store.set("warm", "up");  // its connection is open
                               rlimit none{0, 0};
                               if (rank == 0) setrlimit(RLIMIT_FSIZE, &none);
                               signal(SIGXFSZ, SIG_IGN);
                               try {
                                 make_shm_communicator(store, rank, 2);
                               } catch (const CommError& e) {
                                 if (std::string(e.what()).find("rank 0: shared memory is not available") !=
                                     std::string::npos)
                                   return;
                                 throw;
                               }
                               throw std::runtime_error("no error");
                             }),
            "");
}

}  // namespace
}  // namespace phalanx
