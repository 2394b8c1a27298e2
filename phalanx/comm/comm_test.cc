// The communicator over the local backend: the whole suite with ranks as threads, and what only threads can show. The
// same suite runs over processes in shm_backend_test.cc.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "phalanx/base/error.h"
#include "phalanx/comm/backend_suite.h"
#include "phalanx/comm/local.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;

class LocalSuite : public ::testing::TestWithParam<int> {};

TEST_P(LocalSuite, Passes) {
  for (const SuiteCase& test : backend_suite()) {
    SCOPED_TRACE(test.name);
    EXPECT_NO_THROW(run_local_ranks(GetParam(), [&](const auto& comm) { test.run(*comm); }));
  }
}

TEST_P(LocalSuite, FailsClearly) {
  if (GetParam() < 2) return;
  for (const SuiteCase& test : backend_failure_suite()) {
    SCOPED_TRACE(test.name);
    EXPECT_NO_THROW(run_local_ranks(GetParam(), [&](const auto& comm) { test.run(*comm); }, {.first_timeout = 300ms}));
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, LocalSuite, ::testing::Values(1, 2, 3, 4, 8));

TEST(LocalRanks, FirstErrorIsRethrownWithItsRankAndFreesTheOthers) {
  std::atomic<int> freed{0};
  try {
    run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
      if (comm->rank() == 1) throw ConfigError("no such key");
      try {
        comm->barrier();
      } catch (const CommError& e) {
        EXPECT_THAT(e.what(), ::testing::HasSubstr("no such key"));
        ++freed;
        throw;
      }
    });
    FAIL() << "no error";
  } catch (const ConfigError& e) {
    EXPECT_STREQ(e.what(), "rank 1: no such key");
  }
  EXPECT_EQ(freed.load(), 2);
}

TEST(LocalRanks, ForeignErrorsKeepTheirType) {
  EXPECT_THROW(run_local_ranks(2, [](const std::shared_ptr<Communicator>&) { throw std::out_of_range("x"); }),
               std::out_of_range);
}

TEST(LocalRanks, TimeoutsShortenWhenTrainingHasStarted) {
  run_local_ranks(2,
                  [](const std::shared_ptr<Communicator>& comm) {
                    auto child = comm->split(0, comm->rank());
                    comm->mark_started();  // for what was split from it, too
                    if (comm->rank() == 0) {
                      EXPECT_THROW(child->barrier(), CommError);
                      return;
                    }
                    at::Tensor x = at::full({1}, 1.0F);
                    EXPECT_THROW(child->recv(x, 0), CommError);
                  },
                  {.first_timeout = 600s, .timeout = 100ms});
}

}  // namespace
}  // namespace phalanx
