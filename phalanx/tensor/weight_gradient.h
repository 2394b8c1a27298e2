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
#pragma once

#include <ATen/core/Tensor.h>

namespace phalanx {

struct WeightGradient {
  at::Tensor out;       // of the weight's shape; to be written with beta = 0, added to with beta = 1
  double beta = 0.0;    // of the first product; further ones add
  at::Tensor returned;  // what backward() returns for the weight: `out`, or undefined if that is weight.grad() already
};

/// Only inside a backward function, once for each contribution, right before it is written: from then on the buffer is
/// weight.grad(), and worthless if the function throws before it has written all of it. Does not wait for anything.
WeightGradient weight_gradient(const at::Tensor& weight);

}  // namespace phalanx
