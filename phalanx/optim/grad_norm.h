// The 2-norm of all gradients taken as one vector, and clipping by it.
//
// Contract
// - On the CPU the squares of float32 gradients are summed in float64 in an order fixed by the data alone (not by the
//   number of threads or the instruction set), so the norm has the same bits on every run and on every rank that holds
//   the same gradients. Other dtypes and devices go through ATen, whose order is fixed for a given device.
// - Parameters without a gradient count as zero.
// - clip_grad_norm() multiplies every gradient by max_norm / (norm + 1e-6) where that is below 1 (PyTorch's formula)
// and
//   returns the norm before clipping. If the norm is NaN or infinite the gradients are left as they are and
//   is_finite() is false: whether to stop or to skip the step is the caller's choice.
// - On CUDA nothing waits for the device until value() or is_finite() is called.
//
//   const GradNorm norm = clip_grad_norm(optimizer.parameters(), 1.0);
//   if (!norm.is_finite()) throw Error("the gradient norm is not finite");
#pragma once

#include <vector>

#include "phalanx/tensor/named.h"

namespace phalanx {

class GradNorm {
 public:
  explicit GradNorm(double value) : value_(value) {}
  explicit GradNorm(at::Tensor on_device) : on_device_(std::move(on_device)) {}

  double value() const;  // on CUDA: waits for the device
  bool is_finite() const;
  const at::Tensor& on_device() const noexcept { return on_device_; }  // undefined on the CPU

 private:
  at::Tensor on_device_;  // 0-dim float64; undefined where the value is known
  double value_ = 0;
};

GradNorm grad_norm(const std::vector<NamedTensor>& parameters);
/// max_norm must be positive; infinity measures only.
GradNorm clip_grad_norm(const std::vector<NamedTensor>& parameters, double max_norm);

}  // namespace phalanx
