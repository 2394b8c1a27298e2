#include "phalanx/kernels/linear_cross_entropy.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>

namespace phalanx::kernels {

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels) {
  return at::cross_entropy_loss(logits.to(at::kFloat).flatten(0, -2), labels.flatten());
}

at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& labels) {
  return cross_entropy(at::linear(x, weight), labels);
}

}  // namespace phalanx::kernels
