#include "phalanx/base/testing/quiet_fork.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "phalanx/base/testing/comes_true.h"

namespace phalanx {
namespace {

TEST(QuietFork, SeesWhetherAnotherThreadRuns) {
  std::promise<void> may_end;
  std::atomic<bool> is_busy = true;
  std::thread other([&] {
    while (is_busy) {
    }
    may_end.get_future().wait();
  });
  EXPECT_TRUE(comes_true([] { return !other_threads_sleep(); }));
  is_busy = false;
  EXPECT_TRUE(comes_true([] { return other_threads_sleep(); }));
  may_end.set_value();
  other.join();
}

}  // namespace
}  // namespace phalanx
