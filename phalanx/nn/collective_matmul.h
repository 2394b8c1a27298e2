// CollectiveMatmul: how layers multiply if each rank has some rows of the activations and some columns of the products.
//
// A layer that is split over ranks needs all rows of its input, and it computes addends of its output. The code that
// splits the model (parallel/tensor/styles.h) gives the layers a CollectiveMatmul, and they multiply through it. Then
// some rows can be in flight while others are multiplied. Layers without one multiply as usual.
//
//   std::vector<at::Tensor> qkv = matmul.all_gather_matmul(x, {wq, wk, wv});  // x: this rank's rows; q, k, v: all rows
//   return matmul.matmul_reduce_scatter(y, wo);             // y: all rows; the result: this rank's rows of the sum
//
// Contract: collective, in the forward pass and in the backward pass. Tensors are [..., features], all of one batch of
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
  /// For a layer whose own call must happen (it has hooks): only the exchange, before and after it.
  virtual at::Tensor gather(const at::Tensor& x) const = 0;
  virtual at::Tensor scatter(const at::Tensor& y) const = 0;
};

}  // namespace phalanx::nn
