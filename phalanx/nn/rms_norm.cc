#include "phalanx/nn/rms_norm.h"

#include <ATen/TensorOperators.h>

#include "phalanx/kernels/rms_norm.h"

namespace phalanx::nn {

RMSNorm::RMSNorm(std::int64_t dim, double eps, TensorOptionsOfModule tensor, bool adds_one)
    : Norm("RMSNorm", dim, eps, tensor, adds_one ? 0.0 : 1.0), adds_one_(adds_one) {}

// In fp32, as 1 + w has fewer digits of w in 16 bits. A weight that is stored in 16 bits is widened for x in fp32.
at::Tensor RMSNorm::factor(const at::Tensor& x) const {
  at::Tensor w = used("weight", weight);
  if (x.scalar_type() == at::kFloat) w = w.to(at::kFloat);
  return adds_one_ ? w.to(at::kFloat) + 1.0 : w;
}

at::Tensor RMSNorm::forward(const at::Tensor& x) {
  const at::Tensor w = factor(x);
  // In the type of x where the weight itself would not have widened it.
  const auto narrowed = [&](const at::Tensor& y) {
    return adds_one_ && weight.scalar_type() != at::kFloat ? y.to(x.scalar_type()) : y;
  };
  if (!group_mean_) return narrowed(kernels::rms_norm(x, w, eps()));
  const at::Tensor h = x.to(at::kFloat);
  const at::Tensor mean = group_mean_((h * h).mean(-1, /*keepdim=*/true));
  return narrowed((h * mean.add(eps()).rsqrt()).to(x.scalar_type()) * w);
}

kernels::ResidualNorm RMSNorm::add(const at::Tensor& x, const at::Tensor& delta) {
  if (!adds_one_) return kernels::add_rms_norm(x, delta, factor(x), eps());
  const at::Tensor h = delta.defined() ? x + delta : x;
  return {h, forward(h)};
}

}  // namespace phalanx::nn
