// DeviceStreams: the streams and events of one accelerator, as far as comm/ needs them. It knows neither CUDA nor
// torch, so code built on it can be tested without a GPU.
//
// - The work of one stream runs in order. An event marks a position in a stream: a waiter continues when all work
//   before that position is done. An event that was never recorded does not exist here.
// - "Current" is the stream on which the calling thread computes (for CUDA: c10's current stream of the device).
// - Every call but DeviceEvent::is_done() only enqueues something and returns. Any thread may call.
//
//   auto streams = make_cuda_streams(0);
//   DeviceStream comm_stream = streams->make_stream();
//   auto ready = streams->record_current();       // what the tensor's values depend on
//   streams->wait(comm_stream, *ready);
//   // ... launch on comm_stream ...
//   auto done = streams->record(comm_stream);
//   streams->current_waits(*done);                // the host continues, the compute stream waits
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace phalanx {

using DeviceStream = void*;  // a cudaStream_t

class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// Does not block. Throws CommError if the device has failed.
  virtual bool is_done() const = 0;
  /// When the device got there, in microseconds since the epoch, within a millisecond of the host's clock. Nothing: it
  /// is not there yet, or the event keeps no time. Does not wait for the device. Throws CommError if it has failed.
  virtual std::optional<std::int64_t> time_us() const { return std::nullopt; }
  /// How long before `later` it got there, in microseconds; negative: after it. By the device's clock alone. Nothing:
  /// as above, for either.
  virtual std::optional<std::int64_t> us_before(const DeviceEvent& later) const {
    const auto mine = time_us(), other = later.time_us();
    return mine && other ? std::optional(*other - *mine) : std::nullopt;
  }
};

class DeviceStreams {
 public:
  virtual ~DeviceStreams() = default;
  /// A name of the device that is unique in the world; empty: unknown.
  virtual std::string device_identity() const { return ""; }
  /// Makes this the calling thread's current device until the returned handle is destroyed.
  virtual std::shared_ptr<void> enter() const = 0;
  /// Makes `stream` the calling thread's current stream until the returned handle is destroyed.
  virtual std::shared_ptr<void> enter_stream(DeviceStream stream) = 0;
  /// A stream for communication. It has priority over compute streams if the device supports priorities. It lives as
  /// long as this object.
  virtual DeviceStream make_stream() = 0;
  virtual DeviceStream current_stream() const = 0;
  virtual std::shared_ptr<DeviceEvent> record(DeviceStream stream) = 0;
  virtual std::shared_ptr<DeviceEvent> record_current() = 0;
  /// The same for events that keep their time.
  virtual std::shared_ptr<DeviceEvent> record_timed(DeviceStream stream) { return record(stream); }
  virtual std::shared_ptr<DeviceEvent> record_current_timed() { return record_current(); }
  virtual void wait(DeviceStream stream, const DeviceEvent& event) = 0;
  virtual void current_waits(const DeviceEvent& event) = 0;
  /// Copies between any two of device memory and host memory from make_pinned(). Both must live until the copy is done.
  virtual void copy(DeviceStream stream, void* to, const void* from, std::size_t bytes) = 0;
  /// Host memory that the device can read and write directly.
  virtual std::shared_ptr<std::byte> make_pinned(std::size_t bytes) = 0;
};

/// The CUDA device of that index. Throws ConfigError if libtorch is a CPU build or there is no such device.
std::shared_ptr<DeviceStreams> make_cuda_streams(int device);

/// How many CUDA devices this process can use: 0 for a CPU build of libtorch.
int cuda_device_count() noexcept;
/// Makes it the calling thread's current device, for code that names none.
void use_cuda_device(int device);
/// "NVIDIA H100 80GB HBM3"; empty if there is no such device.
std::string cuda_device_name(int device);
/// Whether this is the CUDA build of Phalanx.
bool is_cuda_build() noexcept;

}  // namespace phalanx
