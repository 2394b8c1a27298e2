#include "phalanx/comm/backends/nccl/nccl_operation.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;

// How long NCCL's error is held back for the control plane to name the failed rank.
constexpr std::chrono::milliseconds kNamePatience{700};
// A rank that has ended may have done its part: then the device completes ours within this time.
constexpr std::chrono::milliseconds kEndedPatience{500};

}  // namespace

Progress NcclOperation::poll_completion() {
  if (error_.empty()) {
    error_ = backend_.group().async_error();
    error_since_ = Clock::now();
  }
  if (!error_.empty()) {
    backend_.check_ranks();
    if (Clock::now() - error_since_ > kNamePatience) throw CommError("NCCL: " + error_);
    return Progress::blocked;
  }
  if (launch_ == Launch::under_way) {
    const auto now = Clock::now();
    if (!unlaunched_since_) unlaunched_since_ = now;
    if (now - *unlaunched_since_ > backend_.group().timeout())
      throw CommError(
          fmt::format("NCCL has not taken the call within {:.1f} s, though all ranks have made it: it cannot connect "
                      "them (NCCL_DEBUG=INFO shows what it tries)",
                      std::chrono::duration<double>(backend_.group().timeout()).count()));
  }
  const std::shared_ptr<DeviceEvent> end = completion_->event();
  return end && end->is_done() ? Progress::done : Progress::blocked;
}

// Once the aborted kernels have ended, and no more can come, the device neither reads nor writes our buffers.
bool NcclOperation::retire() noexcept {
  if (!has_begun_) return true;
  if (!completion_->event()) {
    if (launch_ == Launch::under_way && !backend_.group().has_ended()) return false;
    try {
      mark_end();
    } catch (const std::exception&) {
      return true;  // the device has failed
    }
  }
  return completion_->is_done();
}

void NcclOperation::check_device_peers() {
  try {
    backend_.check_ranks();
    failing_since_.reset();
  } catch (const CommError&) {
    const auto now = Clock::now();
    if (!failing_since_) failing_since_ = now;
    if (now - *failing_since_ > kEndedPatience) throw;
  }
}

}  // namespace phalanx
