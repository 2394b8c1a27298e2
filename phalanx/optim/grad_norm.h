// The 2-norm of all gradients taken as one vector, and clipping by it; whole gradients or parts of them on many ranks.
//
// Contract
// - Without a communicator the norm is of what this rank has: of everything, under data parallelism. With one it is of
//   the whole model: every rank of it calls, with parameters on one device, and gets the same bits. A sharded parameter
//   is counted by the first holder of each part, another one by rank 0 alone: a parameter that not every rank has needs
//   a shard. On the CPU this is one all_reduce of 568 bytes.
// - Float32, bfloat16 and float16 gradients on the CPU: the squares of each row (what one index of dimension 0 selects;
//   an element where there is one dimension) are summed in float64 in an order that depends on its length alone, in
//   blocks of kSumOfSquaresBlock, and these sums are added exactly (exact_sum.h). So the norm has the same bits on
//   every run, with any number of threads and ranks, on every instruction set, and however dimension 0 is cut over the
//   ranks. Cuts of other dimensions change the sums of rows: in the 16th digit or so.
// - Float64 on the CPU is summed by libtorch, tensor by tensor, and these sums are added exactly. On other devices
//   libtorch sums each tensor in float64, and so do the ranks: the same bits on every rank, another layout may differ.
// - Parameters without a gradient count as zero.
// - clip_grad_norm() multiplies every gradient here by max_norm / (norm + 1e-6) where that is below 1 (PyTorch's
//   formula) and returns the norm before clipping. If the norm is NaN or infinite the gradients are left as they are
//   and is_finite() is false, on all ranks: whether to stop or to skip the step is the caller's choice.
// - On CUDA nothing waits for the device until value() or is_finite() is called.
// - Throws Error where gradients are sparse or on several devices, and where a parameter's ranks are not the
//   communicator's: without one while others hold parts of it, or on a mesh of more ranks. CommError as all_reduce
//   does.
//
//   const GradNorm norm = clip_grad_norm(optimizer.parameters(), 1.0, world.get());
//   if (!norm.is_finite()) throw Error("the gradient norm is not finite");
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
  at::Tensor on_device_;  // 0-dim float64; undefined where the value is known
  double value_ = 0;
};

GradNorm grad_norm(const std::vector<NamedTensor>& parameters, Communicator* comm = nullptr);
/// max_norm must be positive; infinity measures only.
GradNorm clip_grad_norm(const std::vector<NamedTensor>& parameters, double max_norm, Communicator* comm = nullptr);

}  // namespace phalanx
