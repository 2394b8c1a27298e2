// Where a layer's backward function puts the gradient of a weight.
//
// Autograd's own way is one tensor more and one pass more over it: the layer makes dW, autograd adds it to (or makes
// it) weight.grad(), and a data-parallel bucket takes a copy. Where somebody offers a buffer for the gradient
// (set_grad_buffer), the product can be added there at once, as Megatron-LM's "gradient accumulation fusion" does:
//
//   WeightGradient dw = weight_gradient(weight);              // in backward()
//   dw.out.addmm_(dy.t(), x, dw.beta);                        // beta 0 writes, 1 adds
//   return {dx, dw.returned};
//
// The detour is taken where autograd must see the gradient: under torch::autograd::grad() and backward(inputs=...),
// with create_graph, and for a weight that has hooks of its own or a gradient that somebody else put there. Then (and
// where no buffer is offered) `out` is a new tensor and is returned.
//
// A loss that is fused with its projection has the gradient, but for a factor, in the forward pass already. It computes
// it where it will be wanted, and says in the backward pass that it is:
//
//   EarlyWeightGradient early(weight);                        // in forward()
//   early.out().addmm_(dy.t(), x, 0.0);
//   return {dx, early.deliver(factor)};                       // in backward()
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace phalanx {

struct WeightGradient {
  at::Tensor out;       // of the weight's shape; to be written with beta = 0, added to with beta = 1
  double beta = 0.0;    // of the first product; further ones add
  at::Tensor returned;  // what backward() returns for the weight: `out`, or undefined if that is weight.grad() already
};

/// Only inside a backward function, once for each contribution, right before it is written: from then on the buffer is
/// weight.grad(), and worthless if the function throws before it has written all of it. Does not wait for anything.
WeightGradient weight_gradient(const at::Tensor& weight);

/// Whether autograd would do no more with the weight's gradient than add it to weight.grad(). Only inside a backward
/// function.
bool is_only_accumulated(const at::Tensor& weight);

/// Makes one more contribution part of weight.grad(), outside autograd and without an event; `write` computes it into
/// what it is given, as backward() would.
void add_weight_gradient(const at::Tensor& weight, const std::function<void(const WeightGradient&)>& write);

/// One contribution that is computed before the backward pass, which may never come. It lies in the offered buffer if
/// that is free (the weight has no gradient then, and nobody else's early one is there), else in a tensor of its own.
class EarlyWeightGradient {
 public:
  explicit EarlyWeightGradient(const at::Tensor& weight);

  /// Of the weight's shape, its contents undefined at first. To be used before anything else is done with the weight.
  const at::Tensor& out() const { return *buffer_; }

  /// Only inside a backward function, and once: makes factor times out() part of the gradient, in the order of calls.
  /// Returns what backward() returns for the weight: undefined if that is in weight.grad() already.
  at::Tensor deliver(float factor);

 private:
  at::Tensor weight_;
  std::shared_ptr<at::Tensor> buffer_;
};

}  // namespace phalanx
