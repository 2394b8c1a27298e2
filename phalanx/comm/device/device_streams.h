// DeviceStreams: the streams and events of one accelerator, as far as comm/ needs them. Knows neither CUDA nor torch,
// so that what is built on it can be tested without a GPU.
//
// - Work of one stream is done in order. An event marks a place in a stream; whoever waits for it goes on when all work
//   before that place is done. An event that was never recorded does not exist here.
// - "Current" is the stream on which the calling thread computes (for CUDA: c10's current stream of the device).
// - Every call but DeviceEvent::is_done() only puts something in a queue and returns. Any thread may call.
//
//   auto streams = make_cuda_streams(0);
//   auto ready = streams->record_current();       // what the tensor's values depend on
//   streams->wait(comm_stream, *ready);
//   ...launch on comm_stream...
//   auto done = streams->record(comm_stream);
//   streams->current_waits(*done);                // the host goes on, the compute stream waits
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace phalanx {

using DeviceStream = void*;  // a cudaStream_t

class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// Does not block. Throws CommError if the device has failed.
  virtual bool is_done() const = 0;
};

class DeviceStreams {
 public:
  virtual ~DeviceStreams() = default;
  /// The device by a name that no other in the world has; empty: not known.
  virtual std::string device_identity() const { return ""; }
  /// Makes this device the calling thread's until the returned handle goes.
  virtual std::shared_ptr<void> enter() const = 0;
  /// Makes it the calling thread's current stream until the returned handle goes.
  virtual std::shared_ptr<void> enter_stream(DeviceStream stream) = 0;
  /// A stream for communication, ahead of compute streams where the device knows priorities. Lives as long as this.
  virtual DeviceStream make_stream() = 0;
  virtual std::shared_ptr<DeviceEvent> record(DeviceStream stream) = 0;
  virtual std::shared_ptr<DeviceEvent> record_current() = 0;
  virtual void wait(DeviceStream stream, const DeviceEvent& event) = 0;
  virtual void current_waits(const DeviceEvent& event) = 0;
  /// Between any two of device memory and host memory from make_pinned(); both must live until the copy is done.
  virtual void copy(DeviceStream stream, void* to, const void* from, std::size_t bytes) = 0;
  /// Host memory that the device can copy from and to by itself.
  virtual std::shared_ptr<std::byte> make_pinned(std::size_t bytes) = 0;
};

/// The CUDA device of that index. Throws ConfigError where libtorch is a CPU build or there is no such device.
std::shared_ptr<DeviceStreams> make_cuda_streams(int device);

/// How many CUDA devices this process can use: 0 for a CPU build of libtorch.
int cuda_device_count() noexcept;
/// Makes it the calling thread's current device, for what names none.
void use_cuda_device(int device);
/// "NVIDIA H100 80GB HBM3"; empty if there is no such device.
std::string cuda_device_name(int device);
/// Whether this is the CUDA flavour of Phalanx.
bool is_cuda_build() noexcept;

}  // namespace phalanx
