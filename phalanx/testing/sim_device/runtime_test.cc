#include "phalanx/testing/sim_device/runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>

#include "phalanx/base/testing/error_text.h"
#include "phalanx/testing/sim_device/host_faults.h"

namespace phalanx {
namespace {

namespace sim = sim_device;
using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

// One int of device memory, written and read by kernels.
class Number {
 public:
  Number(sim::Runtime& runtime, int device, std::size_t offset = 0)
      : runtime_(runtime), address_(runtime.memory().begin(device) + offset * sizeof(int)) {}

  sim::Kernel set(const char* name, int value) {
    return {name, {{address_, sizeof(int), true}}, [at = view(), value] { *at = value; }};
  }
  sim::Kernel add_to(const char* name, Number& other) {
    return {name,
            {{address_, sizeof(int), false}, {other.address_, sizeof(int), true}},
            [from = view(), to = other.view()] { *to += *from; }};
  }
  int value() { return *view(); }
  void* address() const { return address_; }

 private:
  int* view() { return static_cast<int*>(runtime_.kernel_view(address_)); }

  sim::Runtime& runtime_;
  std::byte* address_;
};

TEST(SimRuntime, AStreamRunsInOrder) {
  sim::Runtime runtime;
  runtime.set_delays({.longest = 200us, .seed = 7});
  Number sum(runtime, 0), one(runtime, 0, 1);
  runtime.launch({0, 0}, one.set("one", 1));
  runtime.launch({0, 0}, sum.set("zero", 0));
  for (int i = 0; i < 20; ++i) runtime.launch({0, 0}, one.add_to("add", sum));
  runtime.synchronize(sim::StreamId{0, 0}, "test");
  EXPECT_EQ(sum.value(), 20);
  EXPECT_EQ(runtime.launches(0), 22);
  EXPECT_EQ(runtime.launches(1), 0);
  EXPECT_THAT(runtime.launches_by_kernel(), ElementsAre(Pair("add", 20), Pair("one", 1), Pair("zero", 1)));
}

TEST(SimRuntime, StreamsWaitForEvents) {
  sim::Runtime runtime;
  runtime.set_delays({.longest = 2ms, .seed = 3});
  for (int round = 0; round < 10; ++round) {
    Number x(runtime, 0), y(runtime, 0, 1);
    runtime.launch({0, 0}, x.set("x", round));
    runtime.launch({0, 0}, y.set("y", 1));
    runtime.wait({0, 5}, runtime.record({0, 0}));
    runtime.launch({0, 5}, x.add_to("add", y));
    const sim::EventPtr end = runtime.record({0, 5});
    runtime.wait({0, 0}, end);
    runtime.synchronize(end, "test");
    EXPECT_TRUE(end->is_done());
    EXPECT_EQ(y.value(), round + 1);
  }
  EXPECT_THAT(runtime.races(), IsEmpty());
}

[[gnu::noinline]] void wait_twice(sim::Runtime& runtime) {
  for (int i = 0; i < 2; ++i) runtime.synchronize(sim::StreamId{0, 0}, "read back");
}

TEST(SimRuntime, HostWaitsAreCountedByCallSite) {
  sim::Runtime runtime;
  wait_twice(runtime);
  {
    const sim::HostWaitLabel label("the norm");
    runtime.synchronize_device(0, "item");
  }
  EXPECT_EQ(runtime.host_waits().total(), 3);
  EXPECT_THAT(runtime.host_waits().by_site(),
              ElementsAre(Pair(HasSubstr("item in the norm"), 1),
                          Pair(::testing::AllOf(HasSubstr("read back, called by"), HasSubstr("wait_twice")), 2)));
  runtime.host_waits().clear();
  runtime.query(runtime.record({0, 0}));  // a question is no wait
  EXPECT_EQ(runtime.host_waits().total(), 0);
}

TEST(SimRuntime, AFailedKernelFailsItsDevice) {
  sim::Runtime runtime;
  Number x(runtime, 0), y(runtime, 1);
  runtime.launch({0, 0}, {"index", {}, [] { throw std::runtime_error("index 7 is out of range\nmore"); }});
  runtime.launch({0, 0}, x.set("x", 5));
  runtime.launch({1, 0}, y.set("y", 6));
  EXPECT_EQ(error_text([&] { runtime.synchronize_device(0, "test"); }),
            "sim:0: 'index' failed on stream 0: index 7 is out of range");
  EXPECT_NE(error_text([&] { runtime.synchronize(sim::StreamId{0, 0}, "test"); }), "");  // for good
  EXPECT_EQ(x.value(), 0);
  runtime.synchronize_device(1, "test");
  EXPECT_EQ(y.value(), 6);
  runtime.clear_failure(0);
  runtime.synchronize_device(0, "test");
}

// --- races -----------------------------------------------------------------------------------------------------------

TEST(SimRuntime, AMissingWaitIsFoundWhateverTheTiming) {
  for (const auto delay : {0us, 500us}) {
    for (const bool is_sound : {true, false}) {
      sim::Runtime runtime;
      runtime.set_delays({.longest = delay});
      Number x(runtime, 0), y(runtime, 0, 1);
      runtime.launch({0, 0}, y.set("y", 0));
      runtime.wait({0, 1}, runtime.record({0, 0}));
      runtime.launch({0, 0}, x.set("fill", 1));
      const sim::EventPtr filled = runtime.record({0, 0});
      while (!filled->is_done()) std::this_thread::yield();  // the device is done, but the program never asked
      if (is_sound) runtime.wait({0, 1}, filled);
      runtime.launch({0, 1}, x.add_to("sum", y));
      if (is_sound) {
        EXPECT_THAT(runtime.races(), IsEmpty());
      } else {
        EXPECT_THAT(runtime.races(),
                    ElementsAre("read after write: 'sum' on sim:0 stream 1 does not wait for 'fill' on "
                                "sim:0 stream 0"));
      }
    }
  }
}

TEST(SimRuntime, WritesRaceWithReadsAndWrites) {
  sim::Runtime runtime;
  Number x(runtime, 0), y(runtime, 0, 1);
  runtime.launch({0, 0}, x.set("fill", 1));
  runtime.launch({0, 0}, x.add_to("sum", y));
  runtime.launch({0, 1}, x.set("refill", 2));
  EXPECT_THAT(runtime.races(),
              ElementsAre("write after write: 'refill' on sim:0 stream 1 does not wait for 'fill' on sim:0 stream 0",
                          "write after read: 'refill' on sim:0 stream 1 does not wait for 'sum' on sim:0 stream 0"));
  runtime.clear_races();
  EXPECT_THAT(runtime.races(), IsEmpty());
}

TEST(SimRuntime, HostWaitsAndAnsweredQueriesOrderToo) {
  sim::Runtime runtime;
  Number x(runtime, 0);
  runtime.launch({0, 0}, x.set("a", 1));
  runtime.synchronize(sim::StreamId{0, 0}, "test");
  runtime.launch({0, 1}, x.set("b", 2));
  const sim::EventPtr end = runtime.record({0, 1});
  while (!runtime.query(end)) std::this_thread::yield();
  runtime.launch({0, 2}, x.set("c", 3));
  EXPECT_THAT(runtime.races(), IsEmpty());
}

TEST(SimRuntime, WaitsAreTransitiveAndEventsDoNotMove) {
  sim::Runtime runtime;
  Number x(runtime, 0), y(runtime, 0, 1);
  runtime.launch({0, 0}, x.set("x", 1));
  const sim::EventPtr after_x = runtime.record({0, 0});
  runtime.launch({0, 0}, y.set("y", 1));
  runtime.wait({0, 1}, after_x);
  runtime.wait({0, 2}, runtime.record({0, 1}));
  runtime.launch({0, 2}, x.set("x again", 2));
  EXPECT_THAT(runtime.races(), IsEmpty());
  runtime.launch({0, 2}, y.set("y again", 2));  // launched after the event
  EXPECT_THAT(runtime.races(), ElementsAre(HasSubstr("'y again'")));
}

TEST(SimRuntime, OverlapsCountByByte) {
  sim::Runtime runtime;
  std::byte* p = runtime.memory().begin(0);
  const auto write = [&](sim::StreamId stream, const char* name, std::size_t begin, std::size_t bytes) {
    runtime.launch(stream, {name, {{p + begin, bytes, true}}, [] {}});
  };
  write({0, 0}, "low", 0, 100);
  write({0, 1}, "high", 100, 100);
  EXPECT_THAT(runtime.races(), IsEmpty());
  write({0, 2}, "middle", 99, 2);
  EXPECT_THAT(runtime.races(), ElementsAre(HasSubstr("'low'"), HasSubstr("'high'")));
}

// --- memory ----------------------------------------------------------------------------------------------------------

TEST(SimRuntimeDeathTest, TheHostCannotTouchDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto touch = [] {
    sim::Runtime runtime;
    sim::handle_host_faults(&runtime);
    *reinterpret_cast<volatile int*>(runtime.memory().begin(3) + 64) = 1;
  };
  EXPECT_EXIT(touch(), ::testing::KilledBySignal(SIGSEGV), "touched memory of simulated device 3");
}

class SimPinned : public ::testing::Test {
 protected:
  SimPinned() { sim::handle_host_faults(&runtime); }
  ~SimPinned() override { sim::handle_host_faults(nullptr); }

  void copy(const char* name, void* to, const void* from) {
    runtime.launch({0, 0}, {name,
                            {{from, 4, false}, {to, 4, true}},
                            [t = runtime.kernel_view(to), f = runtime.kernel_view(from)] { std::memcpy(t, f, 4); }});
  }
  volatile int& host_number() { return *reinterpret_cast<volatile int*>(pinned); }

  sim::Runtime runtime;
  std::byte* device = runtime.memory().begin(0);
  std::byte* pinned = runtime.allocate_pinned(4);
};

TEST_F(SimPinned, AHostThatWaitsSeesTheCopy) {
  host_number() = 42;
  copy("to device", device, pinned);
  EXPECT_EQ(host_number(), 42);  // both only read
  runtime.synchronize(sim::StreamId{0, 0}, "test");
  host_number() = 0;
  copy("to host", pinned, device);
  runtime.synchronize(sim::StreamId{0, 0}, "test");
  EXPECT_EQ(host_number(), 42);
  EXPECT_THAT(runtime.races(), IsEmpty());
}

TEST_F(SimPinned, AHostReadBeforeTheCopyIsDoneIsFound) {
  copy("to host", pinned, device);
  const sim::EventPtr end = runtime.record({0, 0});
  while (!end->is_done()) std::this_thread::yield();  // the copy has happened; the program cannot know
  EXPECT_EQ(host_number(), 0);
  EXPECT_THAT(runtime.races(), ElementsAre("the host reads pinned memory without waiting for 'to host' on sim:0 stream "
                                           "0, which writes it"));
}

TEST_F(SimPinned, AHostWriteBeforeTheCopyIsDoneIsFound) {
  copy("to device", device, pinned);
  host_number() = 1;
  EXPECT_THAT(runtime.races(), ElementsAre("the host writes pinned memory without waiting for 'to device' on sim:0 "
                                           "stream 0, which reads it"));
}

TEST_F(SimPinned, AFreedBlockIsReusedOnlyWhenItsCopyIsDone) {
  runtime.set_delays({.longest = 400ms, .seed = 5});
  for (int i = 0; i < 3; ++i) copy("to device", device, pinned);
  runtime.pinned().release(pinned);
  std::byte* other = runtime.allocate_pinned(4);
  EXPECT_NE(other, pinned);
  runtime.pinned().release(other);
  runtime.synchronize_device(0, "test");
  std::byte* again = runtime.allocate_pinned(4);
  EXPECT_EQ(again, pinned);
  host_number() = 3;
  EXPECT_THAT(runtime.races(), IsEmpty());
}

TEST_F(SimPinned, AReusedBlockHasNoPast) {
  copy("to device", device, pinned);
  runtime.pinned().release(pinned);
  const sim::EventPtr end = runtime.record({0, 0});
  while (!end->is_done()) std::this_thread::yield();
  ASSERT_EQ(runtime.allocate_pinned(4), pinned);
  runtime.launch({1, 0}, {"to host", {{pinned, 4, true}}, [] {}});
  EXPECT_THAT(runtime.races(), IsEmpty());
}

}  // namespace
}  // namespace phalanx
