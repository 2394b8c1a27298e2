// DeviceCompletion: how far the device is with one operation. The operation and its waiters share it.
#pragma once

#include <memory>
#include <mutex>

#include "phalanx/comm/backend.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {

class DeviceCompletion final : public StreamCompletion {
 public:
  explicit DeviceCompletion(std::shared_ptr<DeviceStreams> streams) : streams_(std::move(streams)) {}
  bool join_current_stream() override;
  bool is_done() const noexcept override;

  void set(std::shared_ptr<DeviceEvent> event);  // the whole operation is enqueued; the event marks its end
  std::shared_ptr<DeviceEvent> event() const;    // nullptr: not yet

 private:
  std::shared_ptr<DeviceStreams> streams_;
  mutable std::mutex mutex_;
  std::shared_ptr<DeviceEvent> event_;
};

}  // namespace phalanx
