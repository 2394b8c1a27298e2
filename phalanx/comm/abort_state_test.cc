#include "phalanx/comm/abort_state.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "phalanx/base/testing/error_text.h"

namespace phalanx {
namespace {

TEST(AbortState, KeepsTheFirstReason) {
  AbortState state;
  EXPECT_FALSE(state.is_set());
  EXPECT_EQ(state.reason(), "");
  EXPECT_NO_THROW(state.throw_if_set());
  EXPECT_TRUE(state.set("rank 2 has died"));
  EXPECT_FALSE(state.set("a later reason"));
  EXPECT_TRUE(state.is_set());
  EXPECT_EQ(error_text<CommError>([&] { state.throw_if_set(); }), "the group was aborted: rank 2 has died");
  EXPECT_EQ(error_text<CommError>([&] { state.throw_if_set("NCCL: split: "); }),
            "NCCL: split: the group was aborted: rank 2 has died");
}

TEST(AbortState, OneOfManyThreadsSetsIt) {
  AbortState state;
  std::atomic<int> first{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&state, &first, i] {
      if (state.set(std::to_string(i))) first.fetch_add(1);
      EXPECT_EQ(state.reason().size(), 1U);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(first.load(), 1);
}

}  // namespace
}  // namespace phalanx
