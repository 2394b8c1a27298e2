// Tests the communicator over the local backend: the whole suite with ranks as threads, and cases that need threads.
// The same suite runs over processes in shm_backend_test.cc.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/testing/backend_suite.h"
#include "phalanx/comm/testing/expect_failure_suite.h"

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
  expect_failure_suite([](const auto& body, const CommunicatorOptions& options) {
    return error_text<std::exception>([&] {
      run_local_ranks(
          GetParam(), [&](const auto& comm) { body(*comm); }, options);
    });
  });
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
        EXPECT_THAT(e.what(), HasSubstr("no such key"));
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
                    comm->mark_started();  // also for communicators that were split from it
                    if (comm->rank() == 0) {
                      EXPECT_THROW(child->barrier(), CommError);
                      return;
                    }
                    at::Tensor x = at::full({1}, 1.0F);
                    EXPECT_THROW(child->recv(x, 1), CommError);  // from itself
                  },
                  {.first_timeout = 600s, .timeout = 100ms});
}

TEST(LocalRanks, ARankThatHasReturnedIsNamedToThoseWhoWaitForIt) {
  const auto begin = std::chrono::steady_clock::now();
  run_local_ranks(3, [](const std::shared_ptr<Communicator>& comm) {
    auto pair = comm->split(comm->rank() == 0 ? -1 : 0, -comm->rank());  // ranks 2, 1
    at::Tensor x = at::full({1}, 1.0F);
    comm->all_reduce(x);
    if (comm->rank() == 1) return;
    EXPECT_THAT(error_text<CommError>([&] {
                  if (comm->rank() == 0)
                    comm->barrier();
                  else
                    pair->recv(x, 1, {.async = true}).wait();
                }),
                HasSubstr("rank 1 has returned"));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
}

TEST(LocalRanks, AnAbortedRankMayUseItsBuffersAtOnce) {
  constexpr std::int64_t kCount = 30'000;
  std::atomic<int> finished{0};
  for (int trial = 0; trial < 40; ++trial) {
    try {
      run_local_ranks(3, [&](const std::shared_ptr<Communicator>& comm) {
        std::thread stopper;
        std::atomic<int> operations{0};
        if (comm->rank() == trial % 3)
          stopper = std::thread([&] {
            while (operations.load() < 3 + trial % 5) std::this_thread::yield();
            for (int k = 0; k < trial * 50; ++k) operations.load();
            comm->abort("stop");
          });
        try {
          for (;; ++operations) {
            at::Tensor x = at::full({kCount}, 1.0F);
            auto* data = x.mutable_data_ptr<float>();
            try {
              if (trial % 2 == 0 || operations.load() < 3) {
                comm->all_reduce(x, {.async = trial % 4 == 2}).wait();
                EXPECT_EQ(data[0], 3.0F);
                EXPECT_EQ(data[kCount - 1], 3.0F);
              } else {
                at::Tensor y = at::full({kCount}, 0.0F);
                comm->batch_isend_irecv({{true, x, (comm->rank() + 1) % 3, 0}, {false, y, (comm->rank() + 2) % 3, 0}});
                EXPECT_EQ(std::count(y.const_data_ptr<float>(), y.const_data_ptr<float>() + kCount, 1.0F), kCount);
              }
            } catch (const CommError&) {
              std::fill_n(data, kCount, std::numeric_limits<float>::quiet_NaN());
              throw;
            }
            ++finished;
          }
        } catch (const CommError&) {
          operations = 1000;
        }
        if (stopper.joinable()) stopper.join();
      });
    } catch (const CommError&) {
    }
  }
  EXPECT_GE(finished.load(), 40 * 3);
}

TEST(AsyncSoak, TenThousandSmallOperationsOverTwoCommunicators) {
  run_local_ranks(2, [](const auto& comm) { suite_async_soak(*comm); });
}

}  // namespace
}  // namespace phalanx
