// The current device and stream, streams and events, as c10's generic guards, c10::Stream and c10::Event see them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>

#include "phalanx/testing/sim_device/torch/registration.h"
#include "phalanx/testing/sim_device/torch/sim_streams.h"

namespace phalanx::sim_device {
namespace {

// As CUDA's pool: 32 streams of each priority. Stream 0 is the default stream.
constexpr int kPoolStreams = 32;

class SimGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  explicit SimGuard(Runtime& runtime) : runtime_(runtime) {}

  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return SimBackend::device(current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) current_device() = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index_of(device), current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    const int index = index_of(device);
    const int turn = turns_[static_cast<std::size_t>(index)]++ % kPoolStreams;
    return stream_of(index, 1 + turn + (is_high_priority ? kPoolStreams : 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_stream(stream.device_index()) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native_handle(id_of(stream)); }
  bool queryStream(const c10::Stream& stream) const override { return runtime_.query(id_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    runtime_.synchronize(id_of(stream), "synchronize a stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    runtime_.synchronize_device(device, "synchronize the device");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new EventPtr;
    event_of(*event) = runtime_.record(id_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) runtime_.wait(id_of(stream), event_of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || runtime_.query(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) runtime_.synchronize(event_of(event), "synchronize an event");
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex /*device*/) const override {
    return std::chrono::duration<double, std::milli>(event_of(end)->time() - event_of(begin)->time()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    sim_backend().memory.record_stream(pointer.get(), id_of(stream));
  }

 private:
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
  static c10::Stream stream_of(int device, std::int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, SimBackend::device(device), id);
  }
  static StreamId id_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static EventPtr& event_of(void* event) { return *static_cast<EventPtr*>(event); }

  Runtime& runtime_;
  mutable std::array<std::atomic<int>, kDevices> turns_{};
};

}  // namespace

void register_device_guard(SimBackend& backend) {
  const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::PrivateUse1, new SimGuard(backend.runtime));
}

}  // namespace phalanx::sim_device
