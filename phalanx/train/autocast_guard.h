// Matrix products in a 16-bit type for as long as the object lives: libtorch's autocast on one device type, per thread.
//
//   {
//     const AutocastGuard autocast(device.type(), autocast_dtype(config, plan));
//     loss = model->loss(tokens, labels);
//   }                                        // the cast copies of the weights are dropped here
//   loss.backward();
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace phalanx::train {

class AutocastGuard {
 public:
  /// Without a type it does nothing.
  AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType device_;
  bool enabled_;
};

}  // namespace phalanx::train
