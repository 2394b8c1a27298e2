#include "phalanx/testing/sim_device/torch/sim_streams.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "phalanx/base/error.h"
#include "phalanx/testing/sim_device/torch/sim_backend.h"

namespace phalanx::sim_device {
namespace {

// Beyond the pool's streams, which other code uses, too.
constexpr std::int64_t kFirstOwnStream = 1000;
constexpr int kStreamBits = 32;  // of a native handle

class SimEvent final : public DeviceEvent {
 public:
  explicit SimEvent(EventPtr event) : event_(std::move(event)) {}
  bool is_done() const override {
    Runtime& runtime = sim_backend().runtime;
    if (const std::string failure = runtime.failure(event_->device()); !failure.empty()) throw CommError(failure);
    return runtime.query(event_);
  }
  // The host learns nothing else by it: is_done() would hide a missing wait.
  std::optional<std::int64_t> time_us() const override {
    if (!event_->is_done()) return std::nullopt;
    const auto since = std::chrono::steady_clock::now() - event_->time();
    return std::chrono::duration_cast<std::chrono::microseconds>(
               (std::chrono::system_clock::now() - since).time_since_epoch())
        .count();
  }
  const EventPtr& get() const { return event_; }

 private:
  EventPtr event_;
};

class SimStreams final : public DeviceStreams {
 public:
  explicit SimStreams(int device) : device_(device) {}

  std::string device_identity() const override { return fmt::format("sim:{}", device_); }
  std::shared_ptr<void> enter() const override {
    return std::make_shared<c10::DeviceGuard>(SimBackend::device(device_));
  }
  std::shared_ptr<void> enter_stream(DeviceStream stream) override {
    return std::make_shared<c10::StreamGuard>(
        c10::Stream(c10::Stream::UNSAFE, SimBackend::device(device_), id_of(stream).stream));
  }
  DeviceStream make_stream() override {
    static std::atomic<std::int64_t> next{kFirstOwnStream};
    return reinterpret_cast<DeviceStream>(next++);  // NOLINT: a number, as cudaStream_t may be
  }
  DeviceStream current_stream() const override {
    return reinterpret_cast<DeviceStream>(phalanx::sim_device::current_stream(device_));  // NOLINT
  }
  std::shared_ptr<DeviceEvent> record(DeviceStream stream) override { return record(id_of(stream)); }
  std::shared_ptr<DeviceEvent> record_current() override { return record(current_stream_id(device_)); }
  void wait(DeviceStream stream, const DeviceEvent& event) override {
    runtime().wait(id_of(stream), static_cast<const SimEvent&>(event).get());
  }
  void current_waits(const DeviceEvent& event) override {
    runtime().wait(current_stream_id(device_), static_cast<const SimEvent&>(event).get());
  }
  void copy(DeviceStream stream, void* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    runtime().launch(id_of(stream), {"copy for a collective",
                                     {{from, bytes, false}, {to, bytes, true}},
                                     [to = runtime().kernel_view(to), from = runtime().kernel_view(from), bytes] {
                                       std::memcpy(to, from, bytes);
                                     }});
  }
  std::shared_ptr<std::byte> make_pinned(std::size_t bytes) override {
    return {runtime().allocate_pinned(bytes), [](std::byte* block) { runtime().pinned().release(block); }};
  }

 private:
  static Runtime& runtime() { return sim_backend().runtime; }
  StreamId id_of(DeviceStream stream) const { return {device_, reinterpret_cast<std::intptr_t>(stream)}; }
  static std::shared_ptr<DeviceEvent> record(StreamId stream) {
    return std::make_shared<SimEvent>(runtime().record(stream));
  }

  int device_;
};

}  // namespace

std::shared_ptr<DeviceStreams> make_sim_streams(int device) { return std::make_shared<SimStreams>(device); }

void* native_handle(StreamId stream) {
  return reinterpret_cast<void*>((std::intptr_t{stream.device} << kStreamBits) | stream.stream);  // NOLINT
}

StreamId stream_of_handle(void* handle) {
  const auto number = reinterpret_cast<std::intptr_t>(handle);
  return {static_cast<int>(number >> kStreamBits), number & ((std::intptr_t{1} << kStreamBits) - 1)};
}

}  // namespace phalanx::sim_device
