// AutocastGuard runs matrix products in a 16-bit type for as long as the object lives. It sets libtorch's autocast for
// one device type, on the calling thread.
// No 16-bit copy of a weight outlives its use (kernels/autocast.h).
//
//   {
//     const AutocastGuard autocast(device.type(), autocast_dtype(config, plan));
//     loss = model->loss(tokens, labels);
//   }
//   loss.backward();
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include "phalanx/kernels/autocast.h"

namespace phalanx::train {

class AutocastGuard {
 public:
  /// Does nothing if `dtype` is not set.
  AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype) {
    if (dtype) scope_.emplace(device, kernels::AutocastState{.enabled = true, .dtype = *dtype});
  }

 private:
  std::optional<kernels::AutocastScope> scope_;
};

}  // namespace phalanx::train
