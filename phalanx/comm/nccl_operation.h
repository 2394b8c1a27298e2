// NcclOperation: what the operations of the nccl backend share: their place among streams, the launch, and the watch
// over the device.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "phalanx/comm/nccl_backend.h"

namespace phalanx {

class NcclOperation : public Operation {
 public:
  std::optional<Doorbell> doorbell() override { return std::nullopt; }
  std::shared_ptr<StreamCompletion> completion() final { return completion_; }
  bool retire() noexcept override {
    // Once the aborted kernels have ended, the device neither reads nor writes our buffers.
    return !has_begun_ || completion_->is_done();
  }

 protected:
  NcclOperation(NcclBackend& backend, const OperationDescription& description)
      : backend_(backend),
        d_(description),
        element_(element_size(description.dtype)),
        type_(nccl_type_of(description.dtype)),
        completion_(std::make_shared<DeviceCompletion>(backend.shared_streams())),
        ready_(backend.streams().record_current()) {}

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

  // Puts what body() puts into the stream behind the caller's work. If it throws, what it began still has an end.
  template <class Body>
  void in_stream(Body body) {
    if (!has_begun_) backend_.streams().wait(backend_.stream(), *ready_);
    has_begun_ = true;
    try {
      body();
    } catch (...) {
      mark_end();
      throw;
    }
  }
  void mark_end() { completion_->set(backend_.streams().record(backend_.stream())); }

  /// Once launched and agreed upon: is the device through? Throws what NCCL, or the control plane, has found out.
  Progress watch();
  void check_device_peers();

  NcclBackend& backend_;
  const OperationDescription& d_;
  const std::size_t element_;
  const NcclType type_;
  std::shared_ptr<DeviceCompletion> completion_;
  std::shared_ptr<DeviceEvent> ready_;  // what the caller's stream had in hand
  bool has_begun_ = false;

 private:
  std::string error_;
  std::chrono::steady_clock::time_point error_since_{};
  std::optional<std::chrono::steady_clock::time_point> trouble_since_;
};

}  // namespace phalanx
