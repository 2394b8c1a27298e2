#include "phalanx/nn/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace phalanx::nn {
namespace {

// Short wavelengths are unchanged, long ones are divided by the factor, those in between are blended.
at::Tensor llama3_frequencies(const RopeScaling& scaling, const at::Tensor& frequencies) {
  const auto length = static_cast<double>(scaling.original_max_seq_len);
  const at::Tensor wavelengths = 2.0 * std::numbers::pi / frequencies;
  const at::Tensor stretched = frequencies / scaling.factor;
  const at::Tensor share =
      (length / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  const at::Tensor blended = (1.0 - share) * stretched + share * frequencies;
  const at::Tensor of_long = at::where(wavelengths > length / scaling.low_freq_factor, stretched, blended);
  return at::where(wavelengths < length / scaling.high_freq_factor, frequencies, of_long);
}

// The pair that turns `turns` times within the original length, as a fractional index.
double pair_of_turns(const RotaryOptions& options, double turns) {
  const auto length = static_cast<double>(options.scaling.original_max_seq_len);
  return static_cast<double>(options.head_dim) * std::log(length / (turns * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(options.theta));
}

// Pairs that turn often are unchanged, those that turn little are divided by the factor, those in between are blended.
at::Tensor yarn_frequencies(const RotaryOptions& options, const at::Tensor& frequencies) {
  const RopeScaling& scaling = options.scaling;
  double first = pair_of_turns(options, scaling.beta_fast), last = pair_of_turns(options, scaling.beta_slow);
  if (scaling.truncate) first = std::floor(first), last = std::ceil(last);
  first = std::max(first, 0.0);
  last = std::min(last, static_cast<double>(options.head_dim - 1));
  if (first == last) last += 0.001;
  const at::Tensor pairs = at::arange(options.head_dim / 2, frequencies.options());
  const at::Tensor stretched = ((pairs - first) / (last - first)).clamp(0.0, 1.0);
  return frequencies / scaling.factor * stretched + frequencies * (1.0 - stretched);
}

at::Tensor longrope_factors(const RotaryOptions& options, const at::TensorOptions& tensor) {
  const RopeScaling& scaling = options.scaling;
  const auto& factors = options.longest > scaling.original_max_seq_len ? scaling.long_factor : scaling.short_factor;
  return at::tensor(factors, at::TensorOptions(at::kDouble)).to(tensor.dtype()).to(tensor.device());
}

double stretched_theta(const RotaryOptions& options) {
  const RopeScaling& scaling = options.scaling;
  if (scaling.type != RopeScalingType::dynamic || options.longest <= scaling.original_max_seq_len) return options.theta;
  const double times = static_cast<double>(options.longest) / static_cast<double>(scaling.original_max_seq_len);
  const auto head_dim = static_cast<double>(options.head_dim);
  return options.theta * std::pow(scaling.factor * times - (scaling.factor - 1.0), head_dim / (head_dim - 2.0));
}

at::Tensor frequencies(const RotaryOptions& options, const at::TensorOptions& tensor) {
  const at::Tensor exponents = at::arange(0, options.head_dim, 2, tensor) / static_cast<double>(options.head_dim);
  if (options.scaling.type == RopeScalingType::longrope) {
    return at::reciprocal(longrope_factors(options, tensor) * at::pow(options.theta, exponents));
  }
  at::Tensor result = at::reciprocal(at::pow(stretched_theta(options), exponents));
  if (options.scaling.type == RopeScalingType::linear) result = result / options.scaling.factor;
  if (options.scaling.type == RopeScalingType::llama3) result = llama3_frequencies(options.scaling, result);
  if (options.scaling.type == RopeScalingType::yarn) result = yarn_frequencies(options, result);
  return result;
}

}  // namespace

RotaryTables RotaryTables::narrow(std::int64_t first, std::int64_t count) const {
  return {cos.narrow(0, first, count), sin.narrow(0, first, count)};
}

RotaryTables RotaryTables::at_positions(const at::Tensor& positions) const {
  const std::int64_t batch = positions.size(0), count = positions.size(1), half = cos.size(1);
  const at::Tensor flat = positions.reshape({-1});
  return {cos.index_select(0, flat).view({batch, count, half}), sin.index_select(0, flat).view({batch, count, half})};
}

RotaryTables rotary_tables(const RotaryOptions& options, std::int64_t max_len, at::Device device) {
  const at::NoGradGuard no_grad;
  // In fp32 throughout, as Hugging Face computes them: the same tables for the same weights.
  const auto tensor = at::TensorOptions(at::kFloat).device(device);
  const at::Tensor angles = at::outer(at::arange(max_len, tensor), frequencies(options, tensor));
  const double times = options.scaling.attention_factor;
  if (times != 1.0) return {angles.cos() * times, angles.sin() * times};
  return {angles.cos(), angles.sin()};  // [max_len, head_dim / 2]
}

}  // namespace phalanx::nn
