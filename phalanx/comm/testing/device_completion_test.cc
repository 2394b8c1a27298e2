// The times of operations on a device, by streams without one.
#include "phalanx/comm/device/device_completion.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "phalanx/comm/testing/fake_streams.h"

namespace phalanx {
namespace {

class DeviceCompletionTest : public ::testing::Test {
 protected:
  ~DeviceCompletionTest() override { FakeStreams::use(nullptr); }

  std::shared_ptr<DeviceStreams> on(DeviceStream stream) {
    FakeStreams::use(stream);
    return streams_;
  }
  /// An operation on the stream for communication that lasts until end() is called.
  void begin() {
    completion_.began(streams_->record_timed(communication_));
    FakeStreams::enqueue(communication_, [ended = ended_.get_future().share()] { ended.wait(); });
    completion_.set(streams_->record_timed(communication_));
  }
  void end() { ended_.set_value(); }
  void await(const DeviceEvent& event) {
    while (!event.is_done()) std::this_thread::yield();
  }

  using Joined = StreamCompletion::Joined;

  std::shared_ptr<FakeStreams> streams_ = std::make_shared<FakeStreams>();
  DeviceStream compute_ = streams_->make_stream(), communication_ = streams_->make_stream();
  DeviceCompletion completion_{on(compute_)};
  std::promise<void> ended_;
};

TEST_F(DeviceCompletionTest, AStreamThatComesBeforeTheEndStandsStill) {
  begin();
  ASSERT_EQ(completion_.join_current_stream(), Joined::issuing_stream);
  const auto joined = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - joined < std::chrono::milliseconds(200)) std::this_thread::yield();
  EXPECT_FALSE(completion_.times());
  end();
  await(*completion_.event());
  const auto times = completion_.times();
  ASSERT_TRUE(times);
  EXPECT_GT(times->started_us, 0);
  EXPECT_GT(times->wait_from_us, 0);
  EXPECT_LT(times->wait_from_us, times->ended_us);
}

TEST_F(DeviceCompletionTest, AStreamThatIsStillComputingDoesNotStandStill) {
  std::promise<void> computed;
  FakeStreams::enqueue(compute_, [done = computed.get_future().share()] { done.wait(); });
  begin();
  ASSERT_EQ(completion_.join_current_stream(), Joined::issuing_stream);
  end();
  await(*completion_.event());
  const auto times = completion_.times();
  ASSERT_TRUE(times);
  EXPECT_EQ(times->wait_from_us, 0);
  computed.set_value();
  await(*streams_->record(compute_));
  EXPECT_EQ(completion_.times()->wait_from_us, 0);  // it came after the end
}

TEST_F(DeviceCompletionTest, AnotherStreamMayWaitOnceItIsLaunched) {
  EXPECT_EQ(completion_.join_current_stream(), Joined::not_yet);
  begin();
  const DeviceStream other = streams_->make_stream();
  {
    const auto on_other = streams_->enter_stream(other);
    EXPECT_EQ(completion_.join_current_stream(), Joined::stream);
  }
  EXPECT_EQ(completion_.join_current_stream(), Joined::issuing_stream);
  end();
  await(*streams_->record(other));
  await(*streams_->record(compute_));
}

TEST_F(DeviceCompletionTest, NobodyNeedsToWait) {
  begin();
  end();
  await(*completion_.event());
  const auto times = completion_.times();
  ASSERT_TRUE(times);
  EXPECT_EQ(times->wait_from_us, 0);
  EXPECT_LE(times->started_us, times->ended_us);
}

}  // namespace
}  // namespace phalanx
