#include "phalanx/comm/device/device_completion.h"

#include "phalanx/base/error.h"

namespace phalanx {

StreamCompletion::Joined DeviceCompletion::join_current_stream() {
  std::shared_ptr<DeviceEvent> end;
  {
    const std::lock_guard lock(mutex_);
    if (!waits_from_) waits_from_ = streams_->record_current_timed();
    end = event_;
  }
  if (!end) return Joined::not_yet;
  streams_->current_waits(*end);
  return streams_->current_stream() == issued_on_ ? Joined::issuing_stream : Joined::stream;
}

std::optional<observe::DeviceTimes> DeviceCompletion::times() const {
  std::shared_ptr<DeviceEvent> begin, end, waits_from;
  {
    const std::lock_guard lock(mutex_);
    begin = begin_, end = event_, waits_from = waits_from_;
  }
  const std::optional<std::int64_t> ended = end ? end->time_us() : std::nullopt;
  if (!ended) return std::nullopt;
  observe::DeviceTimes times{.ended_us = *ended};
  if (const auto lasted = begin ? begin->us_before(*end) : std::nullopt) times.started_us = *ended - *lasted;
  // A stream that is not there yet comes after the end, and does not stand still.
  const auto stood = waits_from ? waits_from->us_before(*end) : std::nullopt;
  if (stood && *stood > 0) times.wait_from_us = *ended - *stood;
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
