// Decides where a layer's backward function puts the gradient of a weight.
//
// Autograd's own way costs one more tensor and one more pass over it: the layer makes dW, autograd adds it to
// weight.grad() (or makes it weight.grad()), and a data-parallel bucket takes a copy. If a listener offers a buffer for
// the gradient (set_grad_buffer), the product can be added there directly, as Megatron-LM's "gradient accumulation
// fusion" does:
//
//   WeightGradient dw = weight_gradient(weight);              // in backward()
//   dw.out.addmm_(dy.t(), x, dw.beta);                        // beta 0 writes, 1 adds
//   return {dx, dw.returned};
//
// Autograd's own way is taken if autograd must see the gradient: under torch::autograd::grad() and
// backward(inputs=...), with create_graph, and for a weight that has its own hooks or a gradient that other code put
// there. Then (and if no buffer is offered) `out` is a new tensor and is returned.
//
// A loss that is fused with its projection has the gradient, except for a factor, already in the forward pass. It
// computes the gradient into its final place and delivers it in the backward pass:
//
//   EarlyWeightGradient early(weight);                        // in forward()
//   early.out().addmm_(dy.t(), x, 0.0);
//   return {dx, early.deliver(factor)};                       // in backward()
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace phalanx {

struct WeightGradient {
  at::Tensor out;       // of the weight's shape; to be written with beta = 0, added to with beta = 1
  double beta = 0.0;    // for the first product; further ones add
  at::Tensor returned;  // what backward() returns for the weight: `out`, or undefined if that is weight.grad() already
};

/// Call it once for each contribution, right before writing it. From then on the buffer is weight.grad(); its contents
/// are invalid if the function throws before it has written all of it. Does not wait for anything.
/// REQUIRES: called inside a backward function.
WeightGradient weight_gradient(const at::Tensor& weight);

/// The same for weights [rows of each, columns] of one dtype that are multiplied with one input. If none has a buffer,
/// their `out` are adjacent, in this order, so that one product can write all of them: in the memory of `made` [all
/// rows, columns], if it is given and has their dtype.
std::vector<WeightGradient> weight_gradients(const std::vector<at::Tensor>& weights, const at::Tensor& made = {});

/// Whether autograd would only add the weight's gradient to weight.grad().
/// REQUIRES: called inside a backward function.
bool is_only_accumulated(const at::Tensor& weight);

/// Adds one more contribution to weight.grad(), outside autograd and without an event. `write` computes it into its
/// argument, as backward() would.
void add_weight_gradient(const at::Tensor& weight, const std::function<void(const WeightGradient&)>& write);

/// Delivers a contribution that was summed in float32 for a 16-bit weight: multiplies `sum` by `factor`, a float32
/// scalar on its device, in place, and rounds the product once. Returns what backward() returns for the weight.
/// REQUIRES: called inside a backward function.
at::Tensor deliver_float32_sum(const at::Tensor& weight, at::Tensor& sum, const at::Tensor& factor);

/// One contribution that is computed before the backward pass, which may never come. It uses the offered buffer if that
/// is free (the weight has no gradient then, and no other early gradient is there), otherwise a new tensor.
class EarlyWeightGradient {
 public:
  explicit EarlyWeightGradient(const at::Tensor& weight);

  /// Has the weight's shape; its contents are undefined at first. Use it before doing anything else with the weight.
  const at::Tensor& out() const { return *buffer_; }

  /// Adds factor times out() to the gradient, in the order of calls. Returns what backward() returns for the weight:
  /// undefined if the gradient is already in weight.grad().
  /// REQUIRES: called inside a backward function, and only once.
  at::Tensor deliver(float factor);

  /// The same with a factor that lies on the weight's device, a scalar: the host does not wait for it.
  at::Tensor deliver(const at::Tensor& factor);

 private:
  at::Tensor deliver_scaled(const std::function<void(at::Tensor&)>& scale);

  at::Tensor weight_;
  std::shared_ptr<at::Tensor> buffer_;
};

}  // namespace phalanx
