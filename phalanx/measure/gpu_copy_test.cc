#include "phalanx/measure/gpu_copy.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::measure {
namespace {

using ::testing::IsSupersetOf;

/// Two simulated GPUs on the host: device memory comes from malloc. The driver's calls are plain functions, so their
/// answers and the recorded calls are here, new for each test.
struct FakeGpus {
  std::set<std::pair<int, int>> linked{{0, 1}, {1, 0}};  // from, to
  int enabling_returns = 0;
  int current = -1;                         // the owner of the current context
  int retained = 0;                         // minus the released ones
  std::set<std::pair<int, int>> enabled;    // from, to
  std::set<std::pair<int, int>> unreached;  // links that copies used before they were enabled
};
FakeGpus* fake_gpus = nullptr;

void* context_of_gpu(int gpu) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(gpu) + 1); }
int gpu_of_context(void* context) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1; }

CudaDriver fake_driver() {
  CudaDriver driver;
  driver.init = [](unsigned) { return 0; };
  driver.device_count = [](int* count) { return *count = 2, 0; };
  driver.device_get = [](int* device, int ordinal) { return *device = ordinal, 0; };
  driver.retain_primary_context = [](void** context, int device) {
    return ++fake_gpus->retained, *context = context_of_gpu(device), 0;
  };
  driver.release_primary_context = [](int) { return --fake_gpus->retained, 0; };
  driver.set_current_context = [](void* context) { return fake_gpus->current = gpu_of_context(context), 0; };
  driver.can_access_peer = [](int* can, int device, int peer) {
    return *can = fake_gpus->linked.contains({device, peer}) ? 1 : 0, 0;
  };
  driver.enable_peer_access = [](void* peer, unsigned flags) {
    if (flags != 0) return 1;
    if (fake_gpus->enabling_returns == 0) fake_gpus->enabled.insert({fake_gpus->current, gpu_of_context(peer)});
    return fake_gpus->enabling_returns;
  };
  driver.synchronize = [] { return 0; };
  driver.allocate = [](std::uint64_t* memory, std::size_t bytes) {
    return *memory = reinterpret_cast<std::uint64_t>(std::malloc(bytes)), 0;
  };
  driver.free = [](std::uint64_t memory) { return std::free(reinterpret_cast<void*>(memory)), 0; };
  driver.allocate_host = [](void** memory, std::size_t bytes) { return *memory = std::malloc(bytes), 0; };
  driver.free_host = [](void* memory) { return std::free(memory), 0; };
  driver.copy_to_device = [](std::uint64_t to, const void* from, std::size_t bytes) {
    return std::memcpy(reinterpret_cast<void*>(to), from, bytes), 0;
  };
  driver.copy_to_host = [](void* to, std::uint64_t from, std::size_t bytes) {
    return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), 0;
  };
  driver.copy_between = [](std::uint64_t to, void* to_context, std::uint64_t from, void* from_context,
                           std::size_t bytes) {
    const std::pair<int, int> pair{gpu_of_context(from_context), gpu_of_context(to_context)};
    if (pair.first != pair.second && !fake_gpus->enabled.contains(pair)) fake_gpus->unreached.insert(pair);
    return std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes), 0;
  };
  return driver;
}

class GpuCopy : public ::testing::Test {
 protected:
  GpuCopy() { fake_gpus = &gpus_; }
  ~GpuCopy() override { fake_gpus = nullptr; }

  static std::vector<std::string> measured(const CudaDriver& driver) {
    std::vector<std::string> names;
    for (const GpuCopySpeed& speed : measure_gpu_copies(driver, 1 << 20)) {
      EXPECT_GT(speed.bytes_per_second, 1e6) << speed.what;
      names.push_back(speed.what);
    }
    return names;
  }
  std::string error_of(const CudaDriver& driver) const {
    try {
      measure_gpu_copies(driver, 1 << 20);
    } catch (const Error& error) {
      EXPECT_EQ(gpus_.retained, 0) << "a context is kept";
      return error.what();
    }
    return "no error";
  }

  FakeGpus gpus_;
};

TEST_F(GpuCopy, EveryPairAndDirectionIsMeasured) {
  EXPECT_THAT(
      measured(fake_driver()),
      ElementsAre("host to GPU0, pinned", "GPU0 to host, pinned", "host to GPU0, pageable", "GPU0 to host, pageable",
                  "GPU0 to GPU0", "GPU0 to GPU1", "host to GPU1, pinned", "GPU1 to host, pinned",
                  "host to GPU1, pageable", "GPU1 to host, pageable", "GPU1 to GPU0", "GPU1 to GPU1"));
  EXPECT_EQ(gpus_.retained, 0);
}

TEST_F(GpuCopy, PeerAccessIsEnabledBeforeTheFirstCopyOfAPair) {
  measured(fake_driver());
  EXPECT_THAT(gpus_.enabled, UnorderedElementsAre(std::pair(0, 1), std::pair(1, 0)));
  EXPECT_TRUE(gpus_.unreached.empty());
}

TEST_F(GpuCopy, APairWithoutPeerAccessIsStaged) {
  gpus_.linked = {{0, 1}};
  EXPECT_THAT(measured(fake_driver()), IsSupersetOf({"GPU0 to GPU1", "GPU1 to GPU0, staged", "GPU1 to GPU1"}));
  EXPECT_THAT(gpus_.enabled, UnorderedElementsAre(std::pair(0, 1)));
  EXPECT_THAT(gpus_.unreached, UnorderedElementsAre(std::pair(1, 0)));
}

TEST_F(GpuCopy, PeerAccessThatIsThereAlreadyIsUsedAndOneTooManyIsStaged) {
  gpus_.enabling_returns = 704;
  EXPECT_THAT(measured(fake_driver()), IsSupersetOf({"GPU0 to GPU1", "GPU1 to GPU0"}));
  gpus_.enabling_returns = 711;
  EXPECT_THAT(measured(fake_driver()), IsSupersetOf({"GPU0 to GPU1, staged", "GPU1 to GPU0, staged"}));
}

TEST_F(GpuCopy, NoGpuIsNothing) {
  CudaDriver driver = fake_driver();
  driver.device_count = [](int* count) { return *count = 0, 0; };
  EXPECT_TRUE(measure_gpu_copies(driver).empty());
}

TEST_F(GpuCopy, AFailingCallIsNamed) {
  const auto error = [this](auto member, auto failing) {
    CudaDriver driver = fake_driver();
    driver.*member = failing;
    return error_of(driver);
  };
  const auto text = [](const char* call, int number) {
    return std::string("the CUDA driver's ") + call + " failed with error " + std::to_string(number);
  };
  using Memory = std::uint64_t;
  EXPECT_EQ(error(&CudaDriver::allocate, [](Memory*, std::size_t) { return 2; }), text("cuMemAlloc", 2));
  EXPECT_EQ(error(&CudaDriver::set_current_context, [](void*) { return 201; }), text("cuCtxSetCurrent", 201));
  EXPECT_EQ(error(&CudaDriver::can_access_peer, [](int*, int, int) { return 101; }),
            text("cuDeviceCanAccessPeer", 101));
  EXPECT_EQ(error(&CudaDriver::enable_peer_access, [](void*, unsigned) { return 205; }),
            text("cuCtxEnablePeerAccess", 205));
  EXPECT_EQ(error(&CudaDriver::copy_to_device, [](Memory, const void*, std::size_t) { return 700; }),
            text("cuMemcpyHtoD", 700));
  EXPECT_EQ(error(&CudaDriver::copy_to_host, [](void*, Memory, std::size_t) { return 700; }),
            text("cuMemcpyDtoH", 700));
  EXPECT_EQ(error(&CudaDriver::copy_between, [](Memory, void*, Memory, void*, std::size_t) { return 1; }),
            text("cuMemcpyPeer", 1));
  EXPECT_EQ(error(&CudaDriver::synchronize, [] { return 719; }), text("cuCtxSynchronize", 719));
}

}  // namespace
}  // namespace phalanx::measure
