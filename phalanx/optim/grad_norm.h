// The 2-norm of all gradients taken as one vector, and gradient clipping by it. Gradients may be whole or split over
// many ranks.
//
//   const GradNorm norm = clip_grad_norm(optimizer.parameters(), 1.0, world.get());
//   if (!norm.is_finite()) throw Error("the gradient norm is not finite");
//
// Contract
// - Without a communicator the norm covers what this rank has: everything, under data parallelism. With one it covers
//   the whole model: every rank of the communicator calls, with parameters on one device, and gets the same bits. Each
//   part of a sharded parameter is counted by its first holder. A parameter without a shard is counted only by rank 0,
//   so a parameter that not every rank has needs a shard. On the CPU this costs one all_reduce of 568 bytes.
// - Float32, bfloat16 and float16 gradients on the CPU: a row is what one index of dimension 0 selects (an element if
//   there is one dimension). The squares of each row are summed in float64, in blocks of kSumOfSquaresBlock, in an
//   order that depends only on the row's length. These sums are added exactly (exact_sum.h). So the norm has the same
//   bits on every run, with any number of threads and ranks, on every instruction set, and however dimension 0 is split
//   over the ranks. Splits of other dimensions change the sums of rows, at about the 16th digit.
// - Float64 on the CPU is summed by libtorch, tensor by tensor, and these sums are added exactly. On other devices
//   squares are summed in float64, by Phalanx's kernel on a GPU, else by libtorch, and so do the ranks. The bits are
//   the same on every rank, but may differ between layouts.
// - Parameters without a gradient count as zero.
// - clip_grad_norm() multiplies every gradient of this rank by max_norm / (norm + 1e-6) if that is below 1 (PyTorch's
//   formula) and returns the norm before clipping. If the norm is NaN or infinite, the gradients are unchanged and
//   is_finite() is false, on all ranks. The caller chooses whether to stop or to skip the step.
// - On CUDA nothing waits for the device until value() or is_finite() is called.
// - Throws Error if gradients are sparse or on several devices. Throws Error if a parameter's ranks are not those of
//   the communicator: no communicator although other ranks hold parts of it, or a mesh of more ranks. CommError as
//   all_reduce does.
#pragma once

#include <vector>

#include "phalanx/tensor/named.h"

namespace phalanx {

class Communicator;

class GradNorm {
 public:
  explicit GradNorm(double value) : value_(value) {}
  explicit GradNorm(at::Tensor on_device) : on_device_(std::move(on_device)) {}

  double value() const;  // on CUDA: waits for the device
  bool is_finite() const;
  const at::Tensor& on_device() const noexcept { return on_device_; }  // undefined on the CPU

 private:
  at::Tensor on_device_;  // 0-dim float64; undefined if the value is known
  double value_ = 0;
};

/// What clip_grad_norm() multiplies gradients by, on the norm's device:
/// a 0-dim float64, 1 for a norm that is not finite.
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);
GradNorm grad_norm(const std::vector<NamedTensor>& parameters, Communicator* comm = nullptr);
/// max_norm must be positive; infinity measures only.
GradNorm clip_grad_norm(const std::vector<NamedTensor>& parameters, double max_norm, Communicator* comm = nullptr);

}  // namespace phalanx
