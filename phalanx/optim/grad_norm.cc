#include "phalanx/optim/grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "phalanx/base/error.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/optim/exact_sum.h"
#include "phalanx/optim/row_squares.h"
#include "phalanx/tensor/scale_in_place.h"

namespace phalanx {
namespace {

constexpr double kClipEpsilon = 1e-6;  // PyTorch's

/// Whether this rank's gradient of the parameter counts in the norm.
bool is_counted(const NamedTensor& parameter, const Communicator* comm) {
  const auto& [name, tensor, shard] = parameter;
  if (!shard) return comm == nullptr || comm->rank() == 0;
  const int ranks = shard->spec.mesh().size();
  if (comm == nullptr) {
    if (shard->box() == shard->spec.global_box()) return true;
    throw Error(
        fmt::format("grad_norm: of '{}' this rank has {} alone ({}): pass the communicator of the {} ranks that "
                    "have it together",
                    name, shard->box().text(), shard->spec.text(), ranks));
  }
  if (ranks > comm->size()) {
    throw Error(
        fmt::format("grad_norm: '{}' is shared by {} ranks ({}), communicator '{}' has {}: pass one with all of "
                    "them",
                    name, ranks, shard->spec.text(), comm->name(), comm->size()));
  }
  return shard->is_first_holder();
}

struct Gradients {
  at::Device device = at::kCPU;
  std::map<int, std::vector<at::Tensor>> all;  // by dtype
  std::vector<at::Tensor> counted;             // not empty
};

Gradients gradients_of(const std::vector<NamedTensor>& parameters, const Communicator* comm) {
  Gradients result;
  if (!parameters.empty()) result.device = parameters.front().tensor.device();
  for (const auto& parameter : parameters) {
    const bool counted = is_counted(parameter, comm);  // called for each one: all ranks find the same mistakes
    const at::Tensor& grad = parameter.tensor.grad();
    if (!grad.defined()) continue;
    if (grad.is_sparse()) {
      throw Error(fmt::format("grad_norm: the gradient of '{}' is sparse; expected dense", parameter.name));
    }
    if (grad.device() != result.device) {
      throw Error(fmt::format("grad_norm: the gradient of '{}' is on {}, the parameter '{}' on {}; expected one device",
                              parameter.name, grad.device().str(), parameters.front().name, result.device.str()));
    }
    result.all[static_cast<int>(grad.scalar_type())].push_back(grad);
    if (counted && grad.numel() > 0) result.counted.push_back(grad);
  }
  return result;
}

GradNorm norm_on_cpu(const Gradients& gradients, Communicator* comm) {
  RowSquares rows;
  std::vector<at::Tensor> copies, others;
  for (const auto& grad : gradients.counted) {
    if (RowSquares::takes(grad.scalar_type())) {
      copies.push_back(grad.contiguous());  // nearly always the same tensor
      rows.add_rows(copies.back());
    } else {
      others.push_back(grad);
    }
  }
  ExactSum sum = rows.sum();
  if (!others.empty()) {
    for (const auto& norm : at::_foreach_norm(others, 2, at::kDouble)) {
      const double value = norm.item<double>();
      sum.add(value * value);
    }
  }
  if (comm != nullptr && comm->size() > 1) {
    ExactSum::Words words = sum.words();
    const auto tensor = at::empty({static_cast<std::int64_t>(words.size())}, at::TensorOptions(at::kLong));
    std::copy(words.begin(), words.end(), tensor.mutable_data_ptr<std::int64_t>());
    comm->all_reduce(tensor);
    std::copy_n(tensor.const_data_ptr<std::int64_t>(), words.size(), words.begin());
    sum = ExactSum::from_words(words);
  }
  return GradNorm(std::sqrt(sum.value()));
}

/// The sum of the squares of gradients of one dtype, a 0-dim float64 tensor on their device.
at::Tensor squares_on_device(const std::vector<at::Tensor>& grads) {
  const auto launch = kernels::gpu_launch(grads.front());
  if (!launch) return at::stack(at::_foreach_norm(grads, 2, at::kDouble)).square().sum();
  std::vector<at::Tensor> dense;
  std::vector<kernels::gpu::ConstTensor> table;
  for (const at::Tensor& grad : grads) {
    dense.push_back(grad.is_non_overlapping_and_dense() ? grad : grad.contiguous());
    table.push_back({grad.numel(), dense.back().const_data_ptr()});
  }
  const int count = static_cast<int>(table.size());
  const std::int64_t blocks = kernels::gpu::squares_blocks(count, table.data());
  const auto numbers = grads.front().options().dtype(at::kDouble);
  const at::Tensor partial = at::empty({blocks}, numbers);
  at::Tensor total = at::empty({}, numbers);
  auto* const sums = partial.mutable_data_ptr<double>();
  launch->check("grad_norm", launch->kernels().squares(launch->stream(), count, table.data(),
                                                       kernels::gpu_type(grads.front().scalar_type()), sums));
  launch->check("grad_norm", launch->kernels().total(launch->stream(), blocks, sums, total.mutable_data_ptr<double>()));
  return total;
}

GradNorm norm_on_device(const Gradients& gradients, Communicator* comm) {
  at::Tensor sum = at::zeros({}, at::TensorOptions(at::kDouble).device(gradients.device));
  std::map<int, std::vector<at::Tensor>> by_dtype;
  for (const auto& grad : gradients.counted) by_dtype[static_cast<int>(grad.scalar_type())].push_back(grad);
  for (const auto& [dtype, grads] : by_dtype) sum.add_(squares_on_device(grads));
  if (comm != nullptr && comm->size() > 1) comm->all_reduce(sum);
  return GradNorm(sum.sqrt());
}

GradNorm norm_of(const Gradients& gradients, Communicator* comm) {
  return gradients.device.is_cpu() ? norm_on_cpu(gradients, comm) : norm_on_device(gradients, comm);
}

}  // namespace

double GradNorm::value() const { return on_device_.defined() ? on_device_.item<double>() : value_; }

bool GradNorm::is_finite() const { return std::isfinite(value()); }

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  const at::Tensor factor = norm.add(kClipEpsilon).reciprocal().mul(max_norm).clamp_max(1.0);
  return at::where(at::isfinite(norm), factor, at::ones_like(norm));
}

GradNorm grad_norm(const std::vector<NamedTensor>& parameters, Communicator* comm) {
  const at::NoGradGuard no_grad;
  return norm_of(gradients_of(parameters, comm), comm);
}

GradNorm clip_grad_norm(const std::vector<NamedTensor>& parameters, double max_norm, Communicator* comm) {
  if (!(max_norm > 0)) {
    throw ConfigError(fmt::format("clip_grad_norm: max_norm is {}: expected a positive number", max_norm));
  }
  const at::NoGradGuard no_grad;
  const Gradients gradients = gradients_of(parameters, comm);
  GradNorm norm = norm_of(gradients, comm);
  if (gradients.device.is_cpu()) {
    const double scale = max_norm / (norm.value() + kClipEpsilon);
    if (norm.is_finite() && scale < 1) {
      for (const auto& [dtype, grads] : gradients.all) {
        for (const at::Tensor& grad : grads) scale_in_place(grad, scale);
      }
    }
    return norm;
  }
  // On a device the scale stays there, so that the host does not wait.
  const at::Tensor scale = clip_factor(norm.on_device(), max_norm);
  for (const auto& [dtype, grads] : gradients.all) {
    if (grads.front().scalar_type() == at::kFloat) {
      at::_foreach_mul_(grads, scale.to(at::kFloat));
    } else {  // the operator for lists wants the scale in the gradients' type
      const at::Tensor wide = scale.to(grads.front().scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
      for (const at::Tensor& grad : grads) scale_in_place(grad, wide);
    }
  }
  return norm;
}

}  // namespace phalanx
