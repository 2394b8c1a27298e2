// libtorch's autocast of one device type on this thread, without its cache of weights.
//
// Autocast can remember the 16-bit copies that it makes of parameters. That cache is one for the whole process, is not
// told of in-place updates, and is emptied by at::autocast::clear_cache() alone: a copy that a backward pass leaves
// there (recomputation runs layers in one) is multiplied by after the optimizer's step, and a copy that was made
// without a gradient hides the parameter's gradient. Emptying it in time is no way out where ranks are threads: it
// would empty it under another rank's forward pass. So there is no cache inside of a scope: each use casts the weight.
// That costs what the cache did where it was emptied after each forward pass, as a layer uses a weight once in one.
//
//   const AutocastState before = autocast_state(at::kCPU);
//   const AutocastScope scope(at::kCPU, {.enabled = true, .dtype = at::kBFloat16});
//   y = at::linear(x, weight);                                    // in bfloat16, with the weight as it is
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

/// As autocast casts in front of a product, in sight of autograd: to its type where it is on; never float64.
inline at::Tensor in_autocast_type(const at::Tensor& x) {
  const auto device = x.device().type();
  const bool casts =
      at::autocast::is_autocast_enabled(device) && x.is_floating_point() && x.scalar_type() != at::kDouble;
  return casts ? x.to(at::autocast::get_autocast_dtype(device)) : x;
}

/// The state for as long as it lives; then what was before.
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
