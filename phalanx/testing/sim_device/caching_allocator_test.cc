#include "phalanx/testing/sim_device/caching_allocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "phalanx/base/testing/error_text.h"

namespace phalanx {
namespace {

namespace sim = sim_device;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
constexpr std::size_t kMebibyte = std::size_t{1} << 20;

class SimAllocator : public ::testing::Test {
 protected:
  std::byte* allocate(std::size_t bytes, std::int64_t stream = 0) { return allocator.allocate({0, stream}, bytes); }
  std::size_t reserved() { return allocator.stats(0).reserved; }
  void use(std::byte* p, std::int64_t stream, const char* name) {
    runtime.launch({0, stream}, {name, {{p, 512, true}}, [] {}});
  }

  sim::Runtime runtime;
  sim::CachingAllocator allocator{runtime};
};

TEST_F(SimAllocator, RoundsAsCudaDoes) {
  allocate(1);
  EXPECT_EQ(allocator.stats(0).allocated, 512);
  EXPECT_EQ(reserved(), 2 * kMebibyte);
  allocate(513);
  EXPECT_EQ(allocator.stats(0).allocated, 512 + 1024);
  EXPECT_EQ(reserved(), 2 * kMebibyte);
  allocate(kMebibyte + 1);
  EXPECT_EQ(reserved(), 22 * kMebibyte);
  allocate(9 * kMebibyte);  // out of the same large segment
  EXPECT_EQ(reserved(), 22 * kMebibyte);
  allocate(11 * kMebibyte);  // its own segment, rounded to 2 MiB
  EXPECT_EQ(reserved(), 34 * kMebibyte);
}

TEST_F(SimAllocator, AStreamReusesItsBlockAtOnce) {
  std::byte* first = allocate(4096);
  allocator.free(first);
  EXPECT_NE(allocate(4096, 1), first);  // another stream
  EXPECT_EQ(allocate(4096), first);
  EXPECT_EQ(allocator.stats(0).reuses, 1);
}

TEST_F(SimAllocator, NeighboursMerge) {
  std::byte* a = allocate(kMebibyte);
  std::byte* b = allocate(kMebibyte);
  EXPECT_EQ(b, a + kMebibyte);
  std::byte* c = allocate(512 * 1024);
  allocator.free(a);
  EXPECT_EQ(reserved(), 4 * kMebibyte);
  allocator.free(b);
  allocator.free(c);
  allocator.empty_cache(0);
  EXPECT_EQ(reserved(), 0);
  EXPECT_EQ(runtime.host_waits().total(), 2);  // cudaFree waits, too
  EXPECT_EQ(allocator.stats(0).peak_reserved, 4 * kMebibyte);
  EXPECT_EQ(allocate(10), a);
}

TEST_F(SimAllocator, MemoryIsPoisoned) {
  std::byte* p = allocate(4096);
  const auto* view = static_cast<const float*>(runtime.kernel_view(p));
  runtime.synchronize_device(0, "test");
  EXPECT_TRUE(std::isnan(view[0]) && std::isnan(view[1023]));  // never used
  runtime.launch({0, 0},
                 {"fill", {{p, 4096, true}}, [at = static_cast<float*>(runtime.kernel_view(p))] { at[7] = 1; }});
  allocator.free(p);
  runtime.synchronize_device(0, "test");
  EXPECT_TRUE(std::isnan(view[7]));
  EXPECT_EQ(runtime.launches(0), 1);  // the device's own work does not count
}

TEST_F(SimAllocator, AForgottenRecordStreamIsARace) {
  std::byte* p = allocate(512);
  runtime.wait({0, 1}, runtime.record({0, 0}));
  use(p, 1, "side");
  allocator.free(p);
  EXPECT_THAT(runtime.races(),
              ElementsAre("write after write: 'free' on sim:0 stream 0 does not wait for 'side' on sim:0 stream 1"));
}

TEST_F(SimAllocator, RecordedUsesDelayTheReuse) {
  runtime.set_delays({.longest = std::chrono::milliseconds(600), .seed = 2});
  std::byte* p = allocate(512);
  allocator.record_stream(p + 100, {0, 1});
  runtime.wait({0, 1}, runtime.record({0, 0}));
  for (int i = 0; i < 3; ++i) use(p, 1, "side");
  allocator.free(p);
  std::byte* other = allocate(512);
  EXPECT_NE(other, p);
  allocator.free(other);
  const sim::EventPtr own = runtime.record({0, 0}), side = runtime.record({0, 1});
  while (!own->is_done() || !side->is_done()) std::this_thread::yield();  // the program has not asked
  allocate(512);                                                          // the allocator has
  use(allocate(512), 0, "again");
  EXPECT_THAT(runtime.races(), IsEmpty());
  use(p, 1, "late");  // the side stream goes on using what it no longer owns
  EXPECT_THAT(runtime.races(), ElementsAre(HasSubstr("'late' on sim:0 stream 1")));
}

TEST_F(SimAllocator, AFullDeviceGivesItsCacheBackAndThenRefuses) {
  allocator.set_capacity(0, 40 * kMebibyte);
  std::byte* big = allocate(30 * kMebibyte);
  EXPECT_THAT(error_text<sim::DeviceOutOfMemory>([&] { allocate(12 * kMebibyte); }),
              HasSubstr("sim:0 is out of memory: 12582912 bytes wanted, 31457280 of 41943040 in use"));
  allocator.free(big);
  allocate(35 * kMebibyte);
  EXPECT_EQ(reserved(), 36 * kMebibyte);
}

}  // namespace
}  // namespace phalanx
