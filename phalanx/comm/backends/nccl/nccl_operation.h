// NcclOperation: what the operations of the nccl backend share: their order among streams, the launch, and the
// observation of the device.
//
// A launch has two steps: NCCL is called, and NCCL has taken the call. Between them the peers may need any time to
// arrive (nccl_communicator.h). Nothing blocks meanwhile: advance() polls. Calls are made in issue order, each when
// NCCL has taken the previous one.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "phalanx/comm/backends/nccl/nccl_backend.h"
#include "phalanx/comm/wait.h"

namespace phalanx {

class NcclOperation : public Operation {
 public:
  std::optional<Doorbell> doorbell() override { return std::nullopt; }
  std::shared_ptr<StreamCompletion> completion() final { return completion_; }
  bool retire() noexcept override;

 protected:
  NcclOperation(NcclBackend& backend, const OperationDescription& description)
      : backend_(backend),
        d_(description),
        element_(element_size(description.dtype)),
        type_(nccl_type_of(description.dtype)),
        completion_(std::make_shared<DeviceCompletion>(backend.shared_streams())),
        ready_(backend.streams().record_current()) {}
  void take_turn() { turn_ = backend_.take_turn(); }

  std::byte* at(void* data, std::int64_t element) const {
    return static_cast<std::byte*>(data) + static_cast<std::size_t>(element) * element_;
  }
  const std::byte* at(const void* data, std::int64_t element) const {
    return static_cast<const std::byte*>(data) + static_cast<std::size_t>(element) * element_;
  }
  void copy(void* to, const void* from, std::int64_t count) const {
    if (count > 0 && to != from)
      backend_.streams().copy(backend_.stream(), to, from, static_cast<std::size_t>(count) * element_);
  }

  // Orders what body() enqueues after the caller's work. If body() throws, the end of what it began is still marked.
  template <class Body>
  void in_stream(Body body) {
    if (!has_begun_) {
      backend_.streams().wait(backend_.stream(), *ready_);
      completion_->began(backend_.streams().record_timed(backend_.stream()));
    }
    has_begun_ = true;
    try {
      body();
    } catch (...) {
      mark_end();
      throw;
    }
  }
  /// The next step of the launch. Never blocks. `body` makes at most one NCCL call. True: the work of `body`, and what
  /// then() adds behind it, is in the stream.
  template <class Body, class Then>
  bool launch_step(Body body, Then then) {
    if (launch_ == Launch::waits) {
      if (!backend_.is_turn(turn_)) return false;
      launch_ = Launch::under_way;
      in_stream(body);
    }
    if (launch_ == Launch::under_way) {
      if (!backend_.group().is_enqueued()) return false;
      launch_ = Launch::done;
      then();
      backend_.end_turn();
    }
    return true;
  }
  /// For the issuing thread: NCCL mostly takes a call within microseconds, so the next one can follow at once.
  template <class Step>
  void launch_briefly(Step step) {
    const auto begin = std::chrono::steady_clock::now();
    SpinBackoff backoff(SpinBackoff::kBackground);
    while (!step() && launch_ == Launch::under_way && std::chrono::steady_clock::now() - begin < kLaunchPatience)
      if (!backoff.step()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  bool is_launched() const noexcept { return launch_ == Launch::done; }
  void mark_end() { completion_->set(backend_.streams().record_timed(backend_.stream())); }

  /// Polls the device. Throws errors that NCCL or the control plane has detected.
  /// REQUIRES: the signatures have been found equal.
  Progress poll_completion();
  void check_device_peers();

  NcclBackend& backend_;
  const OperationDescription& d_;
  const std::size_t element_;
  const NcclType type_;
  std::shared_ptr<DeviceCompletion> completion_;
  std::shared_ptr<DeviceEvent> ready_;  // marks the work queued on the caller's stream
  bool has_begun_ = false;

 private:
  static constexpr std::chrono::milliseconds kLaunchPatience{20};
  enum class Launch : std::uint8_t { waits, under_way, done };

  std::uint64_t turn_ = 0;
  Launch launch_ = Launch::waits;
  std::optional<std::chrono::steady_clock::time_point> unlaunched_since_;
  std::string error_;
  std::chrono::steady_clock::time_point error_since_{};
  std::optional<std::chrono::steady_clock::time_point> failing_since_;
};

}  // namespace phalanx
