// Tensor parallelism written out, forward and backward, on the deep MLP of the other recipes.
//
//   phalanx launch --nproc-per-node 2 -- tensor_parallel_by_hand          also with 1 and 4
//
// Columns: every rank holds dim / ranks columns of each matrix and computes these columns of gelu(x W), which are
// all-gathered in each layer. Backward, the gradient of x is the sum of the ranks' parts.
// Pairs: the columns of one matrix and the rows of the next. Z = s(A x) B = sum over ranks of s(A_i x) B_i. So two
// layers need one all-reduce, and backward one more. Both print what autograd computes on one rank.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu_backward.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "recipes/deep_mlp.h"

namespace {

using Tensors = std::vector<at::Tensor>;
/// Sets the weights' gradients; returns the loss.
using Pass = std::function<at::Tensor(const Tensors& weights, const at::Tensor& x)>;

/// This rank's part of [batch, dim], and the whole tensor from all ranks' parts.
struct Columns {
  phalanx::Communicator& world;
  std::int64_t width() const { return deep_mlp::kDim / world.size(); }
  at::Tensor mine(const at::Tensor& x) const { return x.narrow(1, world.rank() * width(), width()); }
  at::Tensor gathered(const at::Tensor& part) const {
    Tensors parts;
    const at::Tensor all = at::empty({world.size(), part.size(0), width()}, part.options());
    world.all_gather(all, part.contiguous());
    for (int r = 0; r < world.size(); ++r) parts.push_back(all[r]);
    return at::cat(parts, 1);
  }
};

at::Tensor by_columns(const Tensors& weights, at::Tensor x, const Columns& columns) {
  Tensors inputs, sums;  // of each layer: x [batch, dim], x W [batch, dim / ranks]
  for (const at::Tensor& weight : weights) {
    inputs.push_back(x);
    sums.push_back(at::mm(x, weight));
    x = columns.gathered(at::gelu(sums.back()));
  }
  at::Tensor dx = x * (2.0 / static_cast<double>(x.numel()));  // of mean(x^2), the same on every rank
  for (std::size_t i = weights.size(); i-- > 0;) {
    const at::Tensor dsum = at::gelu_backward(columns.mine(dx).contiguous(), sums[i]);
    weights[i].mutable_grad() = at::mm(inputs[i].t(), dsum);
    dx = at::mm(dsum, weights[i].t());
    columns.world.all_reduce(dx);
  }
  return deep_mlp::loss_of(x);
}

at::Tensor by_pairs(const Tensors& weights, at::Tensor x, phalanx::Communicator& world) {
  Tensors inputs, first_sums, inner, second_sums;
  for (std::size_t i = 0; i < weights.size(); i += 2) {
    inputs.push_back(x);
    first_sums.push_back(at::mm(x, weights[i]));  // [batch, dim / ranks]
    inner.push_back(at::gelu(first_sums.back()));
    second_sums.push_back(at::mm(inner.back(), weights[i + 1]));  // [batch, dim], this rank's part of the sum
    world.all_reduce(second_sums.back());
    x = at::gelu(second_sums.back());
  }
  at::Tensor dx = x * (2.0 / static_cast<double>(x.numel()));
  for (std::size_t pair = inputs.size(); pair-- > 0;) {
    const at::Tensor &first = weights[2 * pair], &second = weights[2 * pair + 1];
    const at::Tensor dsecond = at::gelu_backward(dx, second_sums[pair]);
    second.mutable_grad() = at::mm(inner[pair].t(), dsecond);
    const at::Tensor dfirst = at::gelu_backward(at::mm(dsecond, second.t()), first_sums[pair]);
    first.mutable_grad() = at::mm(inputs[pair].t(), dfirst);
    dx = at::mm(dfirst, first.t());
    world.all_reduce(dx);
  }
  return deep_mlp::loss_of(x);
}

/// `dims`: along which dimension each layer's matrix is split.
std::vector<double> train(const std::vector<int>& dims, const phalanx::Communicator& world, const Pass& pass) {
  deep_mlp::Net net;
  phalanx::nn::initialise(net, deep_mlp::kSeed);
  std::vector<phalanx::NamedTensor> parameters;
  Tensors weights;
  for (std::size_t i = 0; i < net.layers.size(); ++i) {
    const std::int64_t part = deep_mlp::kDim / world.size();
    const at::Tensor mine = net.layers[i]->weight.detach().narrow(dims[i], world.rank() * part, part).clone();
    weights.push_back(mine.set_requires_grad(true));
    parameters.push_back({std::to_string(i), weights.back()});
  }
  phalanx::AdamW optimizer(parameters, {.beta2 = 0.999, .weight_decay = 0.01});
  std::vector<double> losses;
  for (int step = 0; step < deep_mlp::kSteps; ++step) {
    const at::NoGradGuard by_hand;
    losses.push_back(pass(weights, deep_mlp::rows_of(0, 1)).item<double>());
    optimizer.step(1e-3);
    optimizer.zero_grad();
  }
  return losses;
}

std::vector<double> train_alone() {
  deep_mlp::Net net;
  phalanx::nn::initialise(net, deep_mlp::kSeed);
  phalanx::AdamW optimizer(phalanx::nn::named_parameters(net), {.beta2 = 0.999, .weight_decay = 0.01});
  std::vector<double> losses;
  for (int step = 0; step < deep_mlp::kSteps; ++step) {
    const at::Tensor loss = deep_mlp::loss_of(phalanx::nn::call(net, deep_mlp::rows_of(0, 1)));
    loss.backward();
    optimizer.step(1e-3);
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace

int main() try {
  const phalanx::ProcessContext context = phalanx::init_from_environment({.device = "cpu"});
  auto& world = *context.world;
  deep_mlp::rows_of(0, world.size());  // throws if the ranks do not divide the dimensions
  const auto columns = train({1, 1, 1, 1}, world,
                             [&](const Tensors& w, const at::Tensor& x) { return by_columns(w, x, Columns{world}); });
  const auto pairs =
      train({1, 0, 1, 0}, world, [&](const Tensors& w, const at::Tensor& x) { return by_pairs(w, x, world); });
  if (context.rank != 0) return 0;
  const auto alone = train_alone();
  double apart = 0;
  for (std::size_t i = 0; i < alone.size(); ++i) {
    fmt::print("step {}: columns {:.7f}, pairs {:.7f}, one rank {:.7f}\n", i + 1, columns[i], pairs[i], alone[i]);
    apart = std::max({apart, std::abs(columns[i] / alone[i] - 1), std::abs(pairs[i] / alone[i] - 1)});
  }
  const bool good = apart < 1e-5;  // not so for NaN
  fmt::print("{} rank(s): losses differ from one rank's by {:.1e}: {}\n", world.size(), apart,
             good ? "the same" : "NOT the same");
  return good ? 0 : 1;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "tensor_parallel_by_hand: {}\n", error.what());
  return error.exit_status();
}
