#include "phalanx/comm/abort_state.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"

namespace phalanx {

bool AbortState::set(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_set_.load(std::memory_order_relaxed)) return false;
  try {
    reason_ = reason;
  } catch (...) {  // no memory for the text: aborted all the same
  }
  is_set_.store(true, std::memory_order_release);
  return true;
}

std::string AbortState::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void AbortState::throw_if_set(const char* prefix) const {
  if (is_set()) throw CommError(fmt::format("{}the group was aborted: {}", prefix, reason()));
}

}  // namespace phalanx
