#include "phalanx/nn/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <c10/core/GradMode.h>

namespace phalanx::nn {

RotaryTables RotaryTables::narrow(std::int64_t first, std::int64_t count) const {
  return {cos.narrow(0, first, count), sin.narrow(0, first, count)};
}

RotaryTables RotaryTables::at_positions(const at::Tensor& positions) const {
  const std::int64_t batch = positions.size(0), count = positions.size(1), half = cos.size(1);
  const at::Tensor flat = positions.reshape({-1});
  return {cos.index_select(0, flat).view({batch, count, half}), sin.index_select(0, flat).view({batch, count, half})};
}

RotaryTables rotary_tables(std::int64_t head_dim, std::int64_t max_len, double theta, at::Device device) {
  const at::NoGradGuard no_grad;
  // In fp32 throughout, as Hugging Face computes them: the same tables for the same weights.
  const auto options = at::TensorOptions(at::kFloat).device(device);
  const at::Tensor exponents = at::arange(0, head_dim, 2, options) / static_cast<double>(head_dim);
  const at::Tensor frequencies = at::reciprocal(at::pow(theta, exponents));
  const at::Tensor angles = at::outer(at::arange(max_len, options), frequencies);  // [max_len, head_dim / 2]
  return {angles.cos(), angles.sin()};
}

}  // namespace phalanx::nn
