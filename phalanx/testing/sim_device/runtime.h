// Runtime: simulated accelerators for tests.
// It is to them what the CUDA runtime is to GPUs, and knows nothing of torch.
//
// - There are kDevices devices. A stream is a queue that a thread of its own works off, with random delays if asked
//   for. Launches, records and waits return at once.
// - Kernels are host functions. They name the memory that they read and write, and use it through kernel_view().
// - Every launch is checked for races (race_detector.h), every wait of the host is counted (host_waits.h).
// - A kernel that throws fails its device: later kernels there do nothing, and every wait of the host on it throws
//   Error, until clear_failure().
// - All threads of the host count as one: what one of them has waited for is done for all.
//
//   Runtime runtime;
//   runtime.launch({0, 0}, {"fill", {{p, 64, true}}, [q = runtime.kernel_view(p)] { std::memset(q, 1, 64); }});
//   const EventPtr filled = runtime.record({0, 0});
//   runtime.wait({0, 3}, filled);                    // stream 3 waits, the host goes on
//   runtime.synchronize(filled, "the test");         // the host waits
//
// Any thread may call.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "phalanx/testing/sim_device/device_memory.h"
#include "phalanx/testing/sim_device/host_waits.h"
#include "phalanx/testing/sim_device/pinned_memory.h"
#include "phalanx/testing/sim_device/race_detector.h"
#include "phalanx/testing/sim_device/vector_clock.h"

namespace phalanx::sim_device {

struct StreamId {
  int device = 0;
  std::int64_t stream = 0;  // 0: the device's default stream
  auto operator<=>(const StreamId&) const = default;
};

struct Kernel {
  const char* name = "";  // lives as long as the runtime
  std::vector<Access> accesses;
  std::function<void()> body;
  bool counts_as_launch = true;  // false: the device's own work, such as poisoning freed memory
};

/// A position in a stream.
class Event {
 public:
  /// Whether the device is there. This alone tells the host nothing: see Runtime::query.
  bool is_done() const { return done_.load(std::memory_order_acquire); }
  /// REQUIRES: is_done().
  std::chrono::steady_clock::time_point time() const { return time_; }
  int device() const { return device_; }

 private:
  friend class Runtime;
  int device_ = 0;
  Stamp stamp_;
  VectorClock clock_;
  std::chrono::steady_clock::time_point time_;
  std::atomic<bool> done_{false};
  std::atomic<bool> host_knows_{false};
};
using EventPtr = std::shared_ptr<Event>;

struct Delays {
  std::chrono::microseconds longest{0};  // each kernel starts up to this much late
  std::uint64_t seed = 1;
};

class Runtime {
 public:
  /// `prepare_thread` runs first in each stream's thread.
  explicit Runtime(std::function<void()> prepare_thread = {});
  ~Runtime();  // finishes all work
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  void launch(StreamId stream, Kernel kernel);
  EventPtr record(StreamId stream);
  void wait(StreamId stream, const EventPtr& event);

  /// Whether the event has come, or the stream has nothing left to do. If so, the host knows what that covers, as if it
  /// had waited.
  bool query(const EventPtr& event);
  bool query(StreamId stream);
  /// The host waits, and that is counted with its cause. Throws Error if the device has failed.
  void synchronize(const EventPtr& event, const std::string& cause);
  void synchronize(StreamId stream, const std::string& cause);
  void synchronize_device(int device, const std::string& cause);

  /// The address through which kernels use device memory and pinned memory; other memory stays itself.
  void* kernel_view(const void* address) const;
  DeviceMemory& memory() { return memory_; }
  PinnedMemory& pinned() { return pinned_; }
  /// From pinned(). What a block was used for before is over.
  std::byte* allocate_pinned(std::size_t bytes);
  HostWaits& host_waits() { return host_waits_; }

  /// The race detector no longer knows earlier accesses to that range.
  void forget_accesses(const void* begin, std::size_t bytes);
  std::vector<std::string> races() const;
  void clear_races();
  /// Adds a report about a host access to pinned memory, which `use` was not done with for all the host knew.
  void report_host_access(const PinnedMemory::Use& use, bool is_write);

  std::uint64_t launches(int device) const { return launches_[static_cast<std::size_t>(device)].load(); }
  /// Launches by the kernel's name: of all devices, or of one stream.
  std::map<std::string, std::uint64_t> launches_by_kernel() const;
  std::map<std::string, std::uint64_t> launches_by_kernel(StreamId stream) const;
  void clear_launches();
  void set_delays(Delays delays);
  std::string failure(int device) const;  // "" if the device has not failed
  void clear_failure(int device);

 private:
  struct Stream;

  Stream& stream(StreamId id);  // mutex_ is held
  EventPtr record_locked(Stream& stream);
  void run(Stream& stream, const Kernel& kernel);
  void await(const EventPtr& event);
  void joined(const EventPtr& event);
  void host_joined(const VectorClock& clock);  // REQUIRES: mutex_ is locked
  void throw_if_failed(int device) const;

  const std::function<void()> prepare_thread_;
  DeviceMemory memory_;
  PinnedMemory pinned_;
  HostWaits host_waits_;

  mutable std::mutex mutex_;  // the streams' clocks, the detector, and the order of launches
  RaceDetector detector_;
  VectorClock host_clock_;
  std::uint64_t host_version_ = 1;
  std::map<StreamId, std::map<const char*, std::uint64_t>> launches_by_kernel_;

  std::mutex event_mutex_;
  std::condition_variable event_came_;

  std::atomic<std::int64_t> longest_delay_{0};
  std::atomic<std::uint64_t> delay_seed_{1};
  std::array<std::atomic<std::uint64_t>, kDevices> launches_{};
  mutable std::mutex failure_mutex_;
  std::array<std::string, kDevices> failures_;
  std::array<std::atomic<bool>, kDevices> has_failed_{};

  std::map<StreamId, std::unique_ptr<Stream>> streams_;  // last: the streams' threads use all of the above
};

/// The calling thread's current device.
int& current_device();
/// The calling thread's current stream of that device.
std::int64_t& current_stream(int device);
inline StreamId current_stream_id(int device) { return {device, current_stream(device)}; }

}  // namespace phalanx::sim_device
