// CollectiveMatmul: how layers multiply where each rank has some rows of the activations and some columns of the products.
//
// A layer that is split over ranks needs all rows of its input, and what it computes are addends of its output. Whoever
// splits the model (parallel/tensor/styles.h) hands the layers this, and they multiply through it: so that the rows can
// be on their way while others are multiplied. Layers without one multiply as ever.
//
//   q, k, v = exchange.all_gather_matmul(x, {wq, wk, wv});      // x: this rank's rows; q, k, v: all rows
//   return exchange.matmul_reduce_scatter(y, wo);                   // y: all rows; the result: this rank's rows, summed up
//
// Contract: collective, in the forward pass and in the backward pass. Tensors [..., features], all of one batch of
// activations. Differentiable once.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace phalanx::nn {

class CollectiveMatmul {
 public:
  virtual ~CollectiveMatmul() = default;
  /// All ranks' rows of x, times each weight transposed.
  virtual std::vector<at::Tensor> all_gather_matmul(const at::Tensor& x,
                                                    const std::vector<at::Tensor>& weights) const = 0;
  /// This rank's rows of the sum over the ranks of x times weight transposed.
  virtual at::Tensor matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight) const = 0;
  /// Both around a SwiGLU: w2 (silu(w1 x) * w3 x).
  virtual at::Tensor feed_forward(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2,
                                  const at::Tensor& w3) const = 0;
  /// For a layer that somebody wants to see called: the exchange alone, before and behind it.
  virtual at::Tensor gather(const at::Tensor& x) const = 0;
  virtual at::Tensor scatter(const at::Tensor& y) const = 0;
};

}  // namespace phalanx::nn
