// FakeStreams: streams and events without a device (tests only). A stream is a thread that runs its work in order;
// "device memory" is host memory. A device that runs one kernel at a time, in launch order, has one queue for all its
// streams.
//
// A thread's current stream is the thread itself, unless use() sets another one. In the first case record_current() is
// complete at once, and current_waits() blocks. So code that reads a tensor after Work::wait() is correct, as it would
// be on a real stream.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/comm/device/device_streams.h"

namespace phalanx {

class FakeStreams final : public DeviceStreams {
 public:
  enum class Kernels { at_once, one_at_a_time };
  explicit FakeStreams(Kernels kernels = Kernels::at_once);
  ~FakeStreams() override;  // ends the streams after they have finished all their work

  /// Enqueues work in a stream, as a kernel launch does.
  static void enqueue(DeviceStream stream, std::function<void()> work);
  /// The calling thread's current stream from now on; nullptr: the thread itself.
  static void use(DeviceStream stream);

  /// Sets the result of device_identity().
  void identify(std::string device) { identity_ = std::move(device); }

  std::string device_identity() const override { return identity_; }
  std::shared_ptr<void> enter() const override { return nullptr; }
  std::shared_ptr<void> enter_stream(DeviceStream stream) override;
  DeviceStream make_stream() override;
  DeviceStream current_stream() const override;
  std::shared_ptr<DeviceEvent> record(DeviceStream stream) override;
  std::shared_ptr<DeviceEvent> record_current() override;
  void wait(DeviceStream stream, const DeviceEvent& event) override;
  void current_waits(const DeviceEvent& event) override;
  void copy(DeviceStream stream, void* to, const void* from, std::size_t bytes) override;
  std::shared_ptr<std::byte> make_pinned(std::size_t bytes) override;

 private:
  class Stream;
  const Kernels kernels_;
  std::string identity_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

}  // namespace phalanx
