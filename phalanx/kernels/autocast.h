// Sets libtorch's autocast for one device type on this thread, without its cache of weights.
//
// Autocast can cache the 16-bit copies that it makes of parameters. That cache is shared by the whole process, does not
// notice in-place updates, and is emptied only by at::autocast::clear_cache(). Two things go wrong:
// - A copy that a backward pass leaves there (recomputation runs layers in one) is still used after the optimizer's
//   step.
// - A copy that was made without a gradient hides the parameter's gradient.
// Emptying the cache in time does not work if ranks are threads: it would be emptied during another rank's forward
// pass. So there is no cache inside a scope: each use casts the weight. This costs the same as a cache that is emptied
// after each forward pass, because a layer uses a weight once per forward pass.
//
//   const AutocastState before = autocast_state(at::kCPU);
//   const AutocastScope scope(at::kCPU, {.enabled = true, .dtype = at::kBFloat16});
//   y = at::linear(x, weight);                                    // in bfloat16, with the weight's current values
#pragma once

#include <ATen/autocast_mode.h>

namespace phalanx::kernels {

struct AutocastState {
  bool enabled = false;
  at::ScalarType dtype = at::kBFloat16;
};

inline AutocastState autocast_state(at::DeviceType device) {
  return {.enabled = at::autocast::is_autocast_enabled(device), .dtype = at::autocast::get_autocast_dtype(device)};
}

/// Casts as autocast does in front of a product, visibly to autograd: to autocast's dtype if it is enabled. Never casts
/// float64.
inline at::Tensor in_autocast_type(const at::Tensor& x) {
  const auto device = x.device().type();
  const bool casts =
      at::autocast::is_autocast_enabled(device) && x.is_floating_point() && x.scalar_type() != at::kDouble;
  return casts ? x.to(at::autocast::get_autocast_dtype(device)) : x;
}

/// Sets the state for its lifetime, then restores the previous one.
class [[nodiscard]] AutocastScope {
 public:
  AutocastScope(at::DeviceType device, const AutocastState& state)
      : device_(device), before_(autocast_state(device)), cached_(at::autocast::is_autocast_cache_enabled()) {
    set(state);
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~AutocastScope() {
    set(before_);
    at::autocast::set_autocast_cache_enabled(cached_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  void set(const AutocastState& state) const {
    at::autocast::set_autocast_enabled(device_, state.enabled);
    at::autocast::set_autocast_dtype(device_, state.dtype);
  }

  at::DeviceType device_;
  AutocastState before_;
  bool cached_;
};

}  // namespace phalanx::kernels
