#include "phalanx/comm/nccl_operation.h"

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

using NcclOperationClock = std::chrono::steady_clock;

// How long NCCL's own words wait for the control plane to name the culprit.
constexpr std::chrono::milliseconds kNamePatience{700};
// A rank that has ended may have done its part: then the device is through with ours in a moment.
constexpr std::chrono::milliseconds kEndedPatience{500};

}  // namespace

Progress NcclOperation::watch() {
  if (error_.empty()) {
    error_ = backend_.group().async_error();
    error_since_ = NcclOperationClock::now();
  }
  if (!error_.empty()) {
    backend_.check_ranks();
    if (NcclOperationClock::now() - error_since_ > kNamePatience) throw CommError("NCCL: " + error_);
    return Progress::blocked;
  }
  const std::shared_ptr<DeviceEvent> end = completion_->event();
  return end && end->is_done() ? Progress::done : Progress::blocked;
}

void NcclOperation::check_device_peers() {
  try {
    backend_.check_ranks();
    trouble_since_.reset();
  } catch (const CommError&) {
    const auto now = NcclOperationClock::now();
    if (!trouble_since_) trouble_since_ = now;
    if (now - *trouble_since_ > kEndedPatience) throw;
  }
}

}  // namespace phalanx
