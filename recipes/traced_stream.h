// TracedStream: a separate GPU stream whose work appears in a trace with the times at which the GPU ran it. The host
// returns from a call long before the GPU is done.
//
//   TracedStream copies(device, "copies", trace);
//   copies.run("copy", "comm", [&] { target.copy_(host, /*non_blocking=*/true); });
//   copies.finish();                                      // the host waits; the span is recorded here
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/observe/trace.h"

class TracedStream {
 public:
  /// Waits for everything that other streams of the device have begun, so that existing tensors are ready.
  TracedStream(c10::Device device, std::string track, phalanx::observe::TraceRecorder& trace)
      : gpu_(device.type()),
        stream_(gpu_.getNewStream(device)),
        track_(std::move(track)),
        trace_(trace),
        origin_(device.type(), c10::EventFlag::BACKEND_DEFAULT) {
    gpu_.synchronizeDevice(device.index());
    origin_.record(stream_);
    origin_.synchronize();
    origin_us_ = now_us();
  }

  void run(const char* name, const char* category, const std::function<void()>& what) {
    Running running{name, category, now_us(), timed_event(), timed_event()};
    const c10::StreamGuard guard(stream_);
    running.begin.record(stream_);
    what();
    running.end.record(stream_);
    running_.push_back(std::move(running));
  }

  void finish() {
    for (Running& running : running_) {
      running.end.synchronize();
      trace_.operation(track_, {.name = running.name,
                                .category = running.category,
                                .issued_us = running.issued_us,
                                .started_us = time_of(running.begin),
                                .ended_us = time_of(running.end)});
    }
    running_.clear();
  }

 private:
  struct Running {
    const char* name;
    const char* category;
    std::int64_t issued_us;
    c10::Event begin, end;
  };

  static std::int64_t now_us() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  }
  c10::Event timed_event() const { return {stream_.device_type(), c10::EventFlag::BACKEND_DEFAULT}; }
  std::int64_t time_of(const c10::Event& event) const {
    return origin_us_ + static_cast<std::int64_t>(origin_.elapsedTime(event) * 1e3);  // milliseconds
  }

  c10::impl::VirtualGuardImpl gpu_;
  c10::Stream stream_;
  std::string track_;
  phalanx::observe::TraceRecorder& trace_;
  c10::Event origin_;  // the GPU's clock and the host's, read at the same time
  std::int64_t origin_us_ = 0;
  std::vector<Running> running_;
};
