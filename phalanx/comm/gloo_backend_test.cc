// The gloo backend across real processes: the suite, deaths and time-outs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>

#include "phalanx/base/error.h"
#include "phalanx/comm/backend_suite.h"
#include "phalanx/comm/gloo.h"
#include "phalanx/comm/tcp_store.h"

namespace phalanx {
namespace {

using std::chrono::seconds;

// body(comm) in `world` processes.
std::string run_gloo_ranks(int world, const std::function<void(Communicator&)>& body, CommunicatorOptions options = {},
                           int killed_rank = -1) {
  TcpStoreServer server;
  return run_forked_ranks(
      world,
      [&](int rank) {
        body(*make_gloo_communicator(std::make_shared<TcpStore>(server.address()), rank, world,
                                     {.communicator = options}));
      },
      killed_rank);
}

class GlooSuite : public ::testing::TestWithParam<int> {};

TEST_P(GlooSuite, Passes) {
  EXPECT_EQ(run_gloo_ranks(GetParam(),
                           [](Communicator& comm) {
                             for (const SuiteCase& test : backend_suite()) {
                               try {
                                 test.run(comm);
                               } catch (const std::exception& e) {
                                 throw std::runtime_error(std::string(test.name) + ": " + e.what());
                               }
                             }
                           }),
            "");
}

TEST_P(GlooSuite, FailsClearly) {
  if (GetParam() < 2) return;
  for (const SuiteCase& test : backend_failure_suite()) {
    SCOPED_TRACE(test.name);
    const seconds timeout{test.needs_time_out ? 1 : 60};
    EXPECT_EQ(run_gloo_ranks(GetParam(), [&](Communicator& comm) { test.run(comm); }, {.first_timeout = timeout}), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, GlooSuite, ::testing::Values(1, 2, 3, 4));

TEST(GlooBackend, AWriteToADeadPeerEndsNoProcess) {
  EXPECT_EQ(run_gloo_ranks(2,
                           [](Communicator& comm) {
                             comm.barrier();
                             struct sigaction action {};
                             sigaction(SIGPIPE, nullptr, &action);
                             if (action.sa_handler == SIG_DFL) throw std::runtime_error("SIGPIPE would end the rank");
                           }),
            "");
}

TEST(GlooBackend, SurvivorsNameTheRankThatWasKilledWithinASecond) {
  constexpr int kVictim = 1;
  EXPECT_EQ(run_gloo_ranks(
                3,
                [](Communicator& comm) {
                  at::Tensor x = at::full({300'000}, 1.0F);
                  comm.barrier();
                  if (comm.rank() == kVictim) kill(getpid(), SIGKILL);
                  const auto begin = std::chrono::steady_clock::now();
                  try {
                    for (;;) comm.all_reduce(x);
                  } catch (const CommError& e) {
                    const std::string text = e.what();
                    for (const char* part : {"rank 1 has died", "all_reduce(float32[300000], sum)", "group 'world'"})
                      if (text.find(part) == std::string::npos) throw std::runtime_error("wrong error: " + text);
                    if (std::chrono::steady_clock::now() - begin > seconds(1))
                      throw std::runtime_error("the error came late");
                  }
                },
                {}, kVictim),
            "");
}

TEST(GlooBackend, AKilledRankIsSeenInASplitAndByWhoeverSendsToIt) {
  EXPECT_EQ(run_gloo_ranks(
                4,
                [](Communicator& comm) {
                  // Old ranks 3, 1 and 2, 0: the victim is rank 1 of its pair.
                  auto pair = comm.split(comm.rank() % 2, -comm.rank());
                  at::Tensor x = at::full({5}, 1.0F);
                  comm.barrier();
                  if (comm.rank() == 1) kill(getpid(), SIGKILL);
                  if (comm.rank() % 2 == 0) {
                    for (int k = 0; k < 20; ++k) pair->all_reduce(x);  // nobody of this group has died
                    try {
                      comm.recv(x, 1);
                    } catch (const CommError& e) {
                      if (std::string(e.what()).find("rank 1 has died") == std::string::npos) throw;
                      return;
                    }
                    throw std::runtime_error("no error");
                  }
                  try {
                    for (;;) pair->all_reduce(x);
                  } catch (const CommError& e) {
                    if (std::string(e.what()).find("rank 1 has died") == std::string::npos) throw;
                  }
                },
                {}, 1),
            "");
}

// A rank that has finished and gone is not dead to those who still read what it left.
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
