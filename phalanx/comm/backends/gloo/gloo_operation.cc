#include "phalanx/comm/backends/gloo/gloo_operation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::chrono::milliseconds kBlamePatience{700};
// A death is an error only after this time, when everything that the dead rank sent must have arrived.
constexpr std::chrono::milliseconds kDeathAge{300};

}  // namespace

void gloo_copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

void GlooFailure::set(std::string text) {
  if (!text_.empty()) return;
  text_ = std::move(text);
  since_ = std::chrono::steady_clock::now();
}

void GlooFailure::throw_when_known(const GlooBackend& backend) const {
  backend.throw_if_aborted();
  if (const std::string failure_reason = backend.announced_failure(); !failure_reason.empty())
    throw CommError(failure_reason);
  if (std::chrono::steady_clock::now() - since_ < kBlamePatience) return;
  std::string failure_reason = backend.failure_reason();
  if (failure_reason.empty()) failure_reason = backend.who_left();
  if (failure_reason.empty()) failure_reason = backend.disconnect_reason();
  throw CommError(failure_reason.empty() ? "gloo: " + text_ : fmt::format("{} (gloo: {})", failure_reason, text_));
}

GlooOperation::~GlooOperation() {
  if (has_waited_) backend_.end_wait();
}

bool GlooOperation::can_go_on() {
  if (failure_) {
    failure_.throw_when_known(backend_);
    return false;
  }
  seen_ = backend_.bell()->word.load(std::memory_order_seq_cst);
  backend_.throw_if_aborted();
  return true;
}

std::optional<Doorbell> GlooOperation::doorbell() {
  if (failure_) return std::nullopt;
  return Doorbell{&backend_.bell()->word, seen_, &backend_.bell()->sleepers, false};
}

// Also after a failure: this may name the rank that caused it.
void GlooOperation::check_peers() {
  has_waited_ = true;
  backend_.check_wait(kDeathAge);
}

}  // namespace phalanx
