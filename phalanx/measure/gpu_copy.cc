#include "phalanx/measure/gpu_copy.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx::measure {
namespace {

using Clock = std::chrono::steady_clock;

void check(int status, const char* call) {
  if (status != 0) throw Error(fmt::format("the CUDA driver's {} failed with error {}", call, status));
}

/// One GPU with its context, which is current while it is used, and a buffer.
class GpuBuffer {
 public:
  GpuBuffer(const CudaDriver& driver, int ordinal, std::size_t bytes) : driver_(driver) {
    check(driver.device_get(&device_, ordinal), "cuDeviceGet");
    check(driver.retain_primary_context(&context_, device_), "cuDevicePrimaryCtxRetain");
    try {
      use();
      check(driver.allocate(&memory_, bytes), "cuMemAlloc");
    } catch (...) {
      driver.release_primary_context(device_);
      throw;
    }
  }
  ~GpuBuffer() {
    driver_.set_current_context(context_);
    driver_.free(memory_);
    driver_.release_primary_context(device_);
  }
  GpuBuffer(const GpuBuffer&) = delete;
  GpuBuffer& operator=(const GpuBuffer&) = delete;
  void use() const { check(driver_.set_current_context(context_), "cuCtxSetCurrent"); }
  /// Enables access from this GPU to the other's memory. Returns false if that is impossible or the driver allows no
  /// more peers.
  bool reach(const GpuBuffer& other) const {
    constexpr int kAlreadyEnabled = 704, kTooManyPeers = 711;
    int can = 0;
    check(driver_.can_access_peer(&can, device_, other.device_), "cuDeviceCanAccessPeer");
    if (can == 0) return false;
    use();
    const int status = driver_.enable_peer_access(other.context_, 0);
    if (status == kTooManyPeers) return false;
    if (status != kAlreadyEnabled) check(status, "cuCtxEnablePeerAccess");
    return true;
  }
  void* context() const { return context_; }
  std::uint64_t memory() const { return memory_; }

 private:
  const CudaDriver& driver_;
  int device_ = 0;
  void* context_ = nullptr;
  std::uint64_t memory_ = 0;
};

/// The best of five copies, after one warm-up copy.
double speed_of(const CudaDriver& driver, std::size_t bytes, const char* call, const std::function<int()>& copy) {
  double best = 0;
  for (int repeat = 0; repeat < 6; ++repeat) {
    const auto begin = Clock::now();
    check(copy(), call);
    check(driver.synchronize(), "cuCtxSynchronize");
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (repeat > 0 && seconds > 0) best = std::max(best, static_cast<double>(bytes) / seconds);
  }
  return best;
}

}  // namespace

std::vector<GpuCopySpeed> measure_gpu_copies(const CudaDriver& driver, std::size_t bytes) {
  int count = 0;
  if (driver.init(0) != 0 || driver.device_count(&count) != 0 || count == 0) return {};
  std::vector<GpuCopySpeed> speeds;
  std::vector<std::unique_ptr<GpuBuffer>> gpus;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    gpus.push_back(std::make_unique<GpuBuffer>(driver, ordinal, 2 * bytes));
  }
  // Enable all links before any copy, so that both ends of a link are enabled.
  std::map<std::pair<int, int>, bool> reachable;
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      if (from == to) continue;
      reachable[{from, to}] = gpus[static_cast<std::size_t>(from)]->reach(*gpus[static_cast<std::size_t>(to)]);
    }
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const GpuBuffer& gpu = *gpus[static_cast<std::size_t>(ordinal)];
    gpu.use();
    const auto host_and_device = [&](void* host, const char* kind) {
      const auto up =
          speed_of(driver, bytes, "cuMemcpyHtoD", [&] { return driver.copy_to_device(gpu.memory(), host, bytes); });
      const auto down =
          speed_of(driver, bytes, "cuMemcpyDtoH", [&] { return driver.copy_to_host(host, gpu.memory(), bytes); });
      speeds.push_back({fmt::format("host to GPU{}, {}", ordinal, kind), up});
      speeds.push_back({fmt::format("GPU{} to host, {}", ordinal, kind), down});
    };
    void* pinned = nullptr;
    check(driver.allocate_host(&pinned, bytes), "cuMemAllocHost");
    const std::unique_ptr<void, std::function<void(void*)>> owner(pinned, [&](void* p) { driver.free_host(p); });
    std::memset(pinned, 0, bytes);
    host_and_device(pinned, "pinned");
    const auto pageable = std::make_unique<char[]>(bytes);
    host_and_device(pageable.get(), "pageable");
    for (int other = 0; other < count; ++other) {
      const GpuBuffer& to = *gpus[static_cast<std::size_t>(other)];
      const std::uint64_t target = to.memory() + (other == ordinal ? bytes : 0);
      const auto speed = speed_of(driver, bytes, "cuMemcpyPeer", [&] {
        return driver.copy_between(target, to.context(), gpu.memory(), gpu.context(), bytes);
      });
      const bool direct = other == ordinal || reachable[{ordinal, other}];
      speeds.push_back({fmt::format("GPU{} to GPU{}{}", ordinal, other, direct ? "" : ", staged"), speed});
    }
  }
  return speeds;
}

std::vector<GpuCopySpeed> measure_gpu_copies() {
  // The library stays loaded: the driver does not tolerate unloading.
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {};
  CudaDriver driver;
  bool complete = true;
  const auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    complete = complete && function != nullptr;
  };
  load(driver.init, "cuInit");
  load(driver.device_count, "cuDeviceGetCount");
  load(driver.device_get, "cuDeviceGet");
  load(driver.retain_primary_context, "cuDevicePrimaryCtxRetain");
  load(driver.release_primary_context, "cuDevicePrimaryCtxRelease_v2");
  load(driver.set_current_context, "cuCtxSetCurrent");
  load(driver.can_access_peer, "cuDeviceCanAccessPeer");
  load(driver.enable_peer_access, "cuCtxEnablePeerAccess");
  load(driver.synchronize, "cuCtxSynchronize");
  load(driver.allocate, "cuMemAlloc_v2");
  load(driver.free, "cuMemFree_v2");
  load(driver.allocate_host, "cuMemAllocHost_v2");
  load(driver.free_host, "cuMemFreeHost");
  load(driver.copy_to_device, "cuMemcpyHtoD_v2");
  load(driver.copy_to_host, "cuMemcpyDtoH_v2");
  load(driver.copy_between, "cuMemcpyPeer");
  if (!complete) throw Error("libcuda.so.1 lacks calls that are in every CUDA driver since version 11");
  return measure_gpu_copies(driver);
}

}  // namespace phalanx::measure
