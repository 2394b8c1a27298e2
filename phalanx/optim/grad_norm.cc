#include "phalanx/optim/grad_norm.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "phalanx/base/error.h"
#include "phalanx/optim/sum_of_squares.h"

namespace phalanx {
namespace {

constexpr double kClipEpsilon = 1e-6;  // PyTorch's

bool has_own_kernel(const at::Tensor& grad) {
  return grad.device().is_cpu() && grad.scalar_type() == at::kFloat && grad.is_non_overlapping_and_dense();
}

double sum_of_squares_on_cpu(const std::vector<at::Tensor>& grads) {
  struct Block {
    const float* values;
    std::size_t count;
  };
  std::vector<Block> blocks;
  for (const auto& grad : grads) {
    const auto* values = grad.const_data_ptr<float>();
    const auto count = static_cast<std::size_t>(grad.numel());
    for (std::size_t at = 0; at < count; at += kSumOfSquaresBlock) {
      blocks.push_back({values + at, std::min(kSumOfSquaresBlock, count - at)});
    }
  }
  std::vector<double> parts(blocks.size());
  at::parallel_for(0, static_cast<std::int64_t>(blocks.size()), /*grain_size=*/4,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       const auto& block = blocks[static_cast<std::size_t>(i)];
                       parts[static_cast<std::size_t>(i)] = sum_of_squares(block.values, block.count);
                     }
                   });
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

struct Gradients {
  std::vector<at::Tensor> own_kernel;
  std::map<int, std::vector<at::Tensor>> others;  // by dtype; one device
  std::vector<at::Tensor> all;
};

Gradients gradients_of(const std::vector<NamedTensor>& parameters) {
  Gradients result;
  for (const auto& [name, tensor, shard] : parameters) {
    const at::Tensor& grad = tensor.grad();
    if (!grad.defined()) continue;
    if (grad.is_sparse()) throw Error(fmt::format("grad_norm: the gradient of '{}' is sparse; expected dense", name));
    if (!result.all.empty() && grad.device() != result.all.front().device()) {
      throw Error(fmt::format("grad_norm: the gradient of '{}' is on {}, others are on {}; expected one device", name,
                              grad.device().str(), result.all.front().device().str()));
    }
    result.all.push_back(grad);
    if (has_own_kernel(grad)) {
      result.own_kernel.push_back(grad);
    } else {
      result.others[static_cast<int>(grad.scalar_type())].push_back(grad);
    }
  }
  return result;
}

// The part that ATen computes: the sum of squares as a 0-dim float64 on the gradients' device; undefined if none.
at::Tensor other_sum_of_squares(const Gradients& gradients) {
  std::vector<at::Tensor> norms;
  for (const auto& [dtype, grads] : gradients.others) {
    // 16-bit gradients: their norm may exceed their range.
    const auto accumulate = grads.front().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    for (const auto& norm : at::_foreach_norm(grads, 2, accumulate)) norms.push_back(norm.to(at::kDouble));
  }
  return norms.empty() ? at::Tensor() : at::stack(norms).square().sum();
}

GradNorm norm_of(const Gradients& gradients) {
  const double own = sum_of_squares_on_cpu(gradients.own_kernel);
  const at::Tensor other = other_sum_of_squares(gradients);
  if (!other.defined()) return GradNorm(std::sqrt(own));
  if (other.device().is_cpu()) return GradNorm(std::sqrt(own + other.item<double>()));
  return GradNorm(other.sqrt());  // own kernels run on the CPU only, so all gradients are in `other`
}

}  // namespace

double GradNorm::value() const { return on_device_.defined() ? on_device_.item<double>() : value_; }

bool GradNorm::is_finite() const { return std::isfinite(value()); }

GradNorm grad_norm(const std::vector<NamedTensor>& parameters) {
  const at::NoGradGuard no_grad;
  return norm_of(gradients_of(parameters));
}

GradNorm clip_grad_norm(const std::vector<NamedTensor>& parameters, double max_norm) {
  if (!(max_norm > 0)) {
    throw ConfigError(fmt::format("clip_grad_norm: max_norm is {}: expected a positive number", max_norm));
  }
  const at::NoGradGuard no_grad;
  const Gradients gradients = gradients_of(parameters);
  if (gradients.all.empty()) return GradNorm(0.0);
  const GradNorm norm = norm_of(gradients);
  if (gradients.all.front().device().is_cpu()) {
    const double scale = max_norm / (norm.value() + kClipEpsilon);
    if (norm.is_finite() && scale < 1) {
      if (!gradients.own_kernel.empty()) at::_foreach_mul_(gradients.own_kernel, scale);
      for (const auto& [dtype, grads] : gradients.others) at::_foreach_mul_(grads, scale);
    }
    return norm;
  }
  // On a device the scale stays there, so that the host need not wait.
  const at::Tensor total = norm.on_device();
  const at::Tensor scale = at::where(
      at::isfinite(total), total.add(kClipEpsilon).reciprocal().mul(max_norm).clamp_max(1.0), at::ones_like(total));
  for (const auto& [dtype, grads] : gradients.others) {
    at::_foreach_mul_(grads, scale.to(grads.front().scalar_type()));
  }
  return norm;
}

}  // namespace phalanx
