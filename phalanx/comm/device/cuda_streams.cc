// DeviceStreams over CUDA. Only c10's CUDA headers are used: ATen's drag in cuBLAS, cuSOLVER and cuSPARSE.
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {
namespace {

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // clears it, so that no later call reports it
  throw CommError(fmt::format("CUDA: {}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status)));
}

// Frees something on its own device: another current device would get a context, which costs hundreds of megabytes. At
// the very end of a process the driver may already be gone; then there is nothing to free.
template <class Free>
void on_device(c10::DeviceIndex device, Free free) noexcept {
  try {
    const c10::cuda::CUDAGuard guard(device);
    (void)free();
    (void)cudaGetLastError();
  } catch (const std::exception&) {
  }
}

// Turns the times of events into times of the host.
class CudaClock {
 public:
  explicit CudaClock(int device) : device_(static_cast<c10::DeviceIndex>(device)) {
    const c10::cuda::CUDAGuard guard(device_);
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    for (cudaEvent_t* const event : {&origin_, &next_})
      check_cuda(cudaEventCreateWithFlags(event, cudaEventDefault), "cudaEventCreate");
    while (!renew()) std::this_thread::yield();
  }
  ~CudaClock() {
    for (cudaEvent_t event : {origin_, next_}) on_device(device_, [event] { return cudaEventDestroy(event); });
    on_device(device_, [this] { return cudaStreamDestroy(stream_); });
  }
  CudaClock(const CudaClock&) = delete;
  CudaClock& operator=(const CudaClock&) = delete;

  /// REQUIRES: the device has got there.
  std::int64_t time_us(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    if (now_us() - tried_us_ > kRenewal) renew();
    return origin_us_ + us_between(origin_, event);
  }

  /// Negative if `to` came first. REQUIRES: the device has got to both.
  static std::int64_t us_between(cudaEvent_t from, cudaEvent_t to) {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, from, to), "cudaEventElapsedTime");
    return std::llround(1e3 * static_cast<double>(milliseconds));
  }

 private:
  // As a float, a longer time is not accurate to a microsecond; and the two clocks drift apart.
  static constexpr std::int64_t kRenewal = 10'000'000;
  static constexpr std::int64_t kPatience = 100;  // also how far the clocks may then be apart

  static std::int64_t now_us() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  }

  // Nothing else is in the stream. But streams may share a queue of the device: then another time.
  bool renew() {
    const c10::cuda::CUDAGuard guard(device_);
    const std::int64_t begin = tried_us_ = now_us();
    check_cuda(cudaEventRecord(next_, stream_), "cudaEventRecord");
    for (std::int64_t now = begin; now - begin <= kPatience; now = now_us()) {
      const cudaError_t status = cudaEventQuery(next_);
      if (status == cudaErrorNotReady) {
        (void)cudaGetLastError();
        continue;
      }
      check_cuda(status, "cudaEventQuery");
      std::swap(origin_, next_);
      origin_us_ = now;
      return true;
    }
    return false;
  }

  c10::DeviceIndex device_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t origin_ = nullptr, next_ = nullptr;
  std::int64_t origin_us_ = 0, tried_us_ = 0;
};

// c10::cuda::CUDAEvent would do, but throws c10::Error with a C++ backtrace, and from query() too.
class CudaEvent final : public DeviceEvent {
 public:
  /// Keeps its time if there is a clock.
  CudaEvent(int device, cudaStream_t stream, std::shared_ptr<CudaClock> clock = nullptr)
      : device_(static_cast<c10::DeviceIndex>(device)), clock_(std::move(clock)) {
    const c10::cuda::CUDAGuard guard(device_);
    check_cuda(cudaEventCreateWithFlags(&event_, clock_ ? cudaEventDefault : cudaEventDisableTiming),
               "cudaEventCreate");
    const cudaError_t status = cudaEventRecord(event_, stream);
    if (status != cudaSuccess) (void)cudaEventDestroy(event_);
    check_cuda(status, "cudaEventRecord");
  }
  ~CudaEvent() override {
    on_device(device_, [this] { return cudaEventDestroy(event_); });
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  bool is_done() const override {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check_cuda(status, "cudaEventQuery");
    return true;
  }
  std::optional<std::int64_t> time_us() const override {
    if (!clock_ || !is_done()) return std::nullopt;
    return clock_->time_us(event_);
  }
  std::optional<std::int64_t> us_before(const DeviceEvent& later) const override {
    const auto& other = static_cast<const CudaEvent&>(later);
    if (!clock_ || !other.clock_ || !is_done() || !other.is_done()) return std::nullopt;
    return CudaClock::us_between(event_, other.event_);
  }
  cudaEvent_t get() const noexcept { return event_; }

 private:
  c10::DeviceIndex device_;
  std::shared_ptr<CudaClock> clock_;
  cudaEvent_t event_ = nullptr;
};

class CudaStreams final : public DeviceStreams {
 public:
  explicit CudaStreams(int device) : device_(device) {}
  ~CudaStreams() override {
    for (const cudaStream_t stream : streams_)
      on_device(static_cast<c10::DeviceIndex>(device_), [stream] { return cudaStreamDestroy(stream); });
  }

  std::string device_identity() const override {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    std::string text = "GPU-";
    for (const char byte : properties.uuid.bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
    return text;
  }

  std::shared_ptr<void> enter() const override {
    return std::make_shared<c10::cuda::CUDAGuard>(static_cast<c10::DeviceIndex>(device_));
  }
  std::shared_ptr<void> enter_stream(DeviceStream stream) override {
    return std::make_shared<c10::cuda::CUDAStreamGuard>(
        c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), static_cast<c10::DeviceIndex>(device_)));
  }
  // c10 has one pool of 32 streams: of 33 communicators two would share a stream and delay each other.
  DeviceStream make_stream() override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
    (void)clock();  // made here, not with the first operation
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
    return stream;
  }
  DeviceStream current_stream() const override {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device_)).stream();
  }
  std::shared_ptr<DeviceEvent> record(DeviceStream stream) override {
    return std::make_shared<CudaEvent>(device_, static_cast<cudaStream_t>(stream));
  }
  std::shared_ptr<DeviceEvent> record_current() override { return record(current_stream()); }
  std::shared_ptr<DeviceEvent> record_timed(DeviceStream stream) override {
    return std::make_shared<CudaEvent>(device_, static_cast<cudaStream_t>(stream), clock());
  }
  std::shared_ptr<DeviceEvent> record_current_timed() override { return record_timed(current_stream()); }
  void wait(DeviceStream stream, const DeviceEvent& event) override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    check_cuda(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<const CudaEvent&>(event).get(), 0),
               "cudaStreamWaitEvent");
  }
  void current_waits(const DeviceEvent& event) override { wait(current_stream(), event); }
  void copy(DeviceStream stream, void* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
               "cudaMemcpyAsync");
  }
  std::shared_ptr<std::byte> make_pinned(std::size_t bytes) override {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
    void* memory = nullptr;
    check_cuda(cudaHostAlloc(&memory, bytes > 0 ? bytes : 1, cudaHostAllocPortable), "cudaHostAlloc");
    return {static_cast<std::byte*>(memory), [device = device_](std::byte* pinned) {
              on_device(static_cast<c10::DeviceIndex>(device), [pinned] { return cudaFreeHost(pinned); });
            }};
  }

 private:
  std::shared_ptr<CudaClock> clock() {
    const std::lock_guard lock(mutex_);
    if (!clock_) clock_ = std::make_shared<CudaClock>(device_);
    return clock_;
  }

  int device_;
  std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
  std::shared_ptr<CudaClock> clock_;
};

void check_device(int device) {
  const int count = cuda_device_count();
  if (device < 0 || device >= count)
    throw ConfigError(fmt::format("cuda:{}: this machine has {} CUDA device{}", device, count, count == 1 ? "" : "s"));
}

}  // namespace

std::shared_ptr<DeviceStreams> make_cuda_streams(int device) {
  check_device(device);
  return std::make_shared<CudaStreams>(device);
}

int cuda_device_count() noexcept { return c10::cuda::device_count(); }

void use_cuda_device(int device) {
  check_device(device);
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
}

std::string cuda_device_name(int device) {
  cudaDeviceProp properties{};
  if (device < 0 || device >= cuda_device_count() || cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return "";
  }
  return properties.name;
}

bool is_cuda_build() noexcept { return true; }

}  // namespace phalanx
