// Matrix products in bfloat16 for as long as the object lives: libtorch's autocast on one device type, per thread.
//
//   {
//     const AutocastGuard autocast(device.type(), config.training.mixed_precision_param == "bfloat16");
//     loss = model->loss(tokens, labels);
//   }                                        // the cast copies of the weights are dropped here
//   loss.backward();
#pragma once

#include <c10/core/DeviceType.h>

namespace phalanx::train {

class AutocastGuard {
 public:
  AutocastGuard(c10::DeviceType device, bool enabled);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType device_;
  bool enabled_;
};

}  // namespace phalanx::train
