#include "phalanx/comm/work.h"

#include "phalanx/comm/progress.h"

namespace phalanx {

void Work::wait() const {
  if (state_) state_->wait();
}

bool Work::is_done() const noexcept { return !state_ || state_->is_done(); }

}  // namespace phalanx
