// DeviceCompletion: how far the device is with one operation, and when. The operation and its waiters share it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {

class DeviceCompletion final : public StreamCompletion {
 public:
  /// For an operation that is issued on the calling thread's current stream.
  explicit DeviceCompletion(std::shared_ptr<DeviceStreams> streams)
      : streams_(std::move(streams)), issued_on_(streams_->current_stream()) {}
  Joined join_current_stream() override;
  bool is_done() const noexcept override;

  std::optional<observe::DeviceTimes> times() const override;

  /// Both events keep their time.
  void began(std::shared_ptr<DeviceEvent> event);  // marks that the device may begin with the operation
  void set(std::shared_ptr<DeviceEvent> event);    // the whole operation is enqueued; the event marks its end
  std::shared_ptr<DeviceEvent> event() const;      // nullptr: not yet

 private:
  std::shared_ptr<DeviceStreams> streams_;
  const DeviceStream issued_on_;
  mutable std::mutex mutex_;
  std::shared_ptr<DeviceEvent> begin_, event_;
  std::shared_ptr<DeviceEvent> waits_from_;  // where the first stream that waits for the operation asked to
};

}  // namespace phalanx
