#include "phalanx/comm/device/device_completion.h"

#include "phalanx/base/error.h"

namespace phalanx {

StreamCompletion::Joined DeviceCompletion::join_current_stream() {
  const std::shared_ptr<DeviceEvent> end = event();
  if (!end) return Joined::not_yet;
  std::shared_ptr<DeviceEvent> here = streams_->record_current_timed();
  {
    const std::lock_guard lock(mutex_);
    if (!waits_from_) waits_from_ = std::move(here);
  }
  streams_->current_waits(*end);
  return streams_->current_stream() == issued_on_ ? Joined::issuing_stream : Joined::stream;
}

std::optional<observe::DeviceTimes> DeviceCompletion::times() const {
  const std::lock_guard lock(mutex_);
  const std::optional<std::int64_t> end = event_ ? event_->time_us() : std::nullopt;
  if (!end) return std::nullopt;
  observe::DeviceTimes times{.ended_us = *end};
  if (begin_) times.started_us = begin_->time_us().value_or(0);
  // A stream that is not there yet comes after the end, and does not stand still.
  const std::optional<std::int64_t> from = waits_from_ ? waits_from_->time_us() : std::nullopt;
  if (from && *from < *end) times.wait_from_us = *from;
  return times;
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

void DeviceCompletion::began(std::shared_ptr<DeviceEvent> event) {
  const std::lock_guard lock(mutex_);
  begin_ = std::move(event);
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
