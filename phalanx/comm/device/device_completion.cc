#include "phalanx/comm/device/device_completion.h"

#include "phalanx/base/error.h"

namespace phalanx {

bool DeviceCompletion::join_current_stream() {
  const std::shared_ptr<DeviceEvent> end = event();
  if (!end) return false;
  streams_->current_waits(*end);
  return true;
}

bool DeviceCompletion::is_done() const noexcept {
  const std::shared_ptr<DeviceEvent> end = event();
  if (!end) return false;
  try {
    return end->is_done();
  } catch (const CommError&) {
    return true;  // the device has failed: the operation's driver finds out, too
  }
}

void DeviceCompletion::set(std::shared_ptr<DeviceEvent> event) {
  const std::lock_guard lock(mutex_);
  event_ = std::move(event);
}

std::shared_ptr<DeviceEvent> DeviceCompletion::event() const {
  const std::lock_guard lock(mutex_);
  return event_;
}

}  // namespace phalanx
