#include "phalanx/train/autocast_guard.h"

#include <ATen/autocast_mode.h>

namespace phalanx::train {

AutocastGuard::AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype)
    : device_(device), enabled_(dtype.has_value()) {
  if (!enabled_) return;
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(device_, *dtype);
}

AutocastGuard::~AutocastGuard() {
  if (!enabled_) return;
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, false);
}

}  // namespace phalanx::train
