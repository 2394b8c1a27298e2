// A layer of causal attention with 8 heads: q, k, v = x Wq, x Wk, x Wv, y = attention(q, k, v) Wo,
// loss mean((y - x)^2). Everything is a function of fixed seeds, so that programs and ranks can compare their numbers.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/tensor/init.h"
#include "recipes/recipe.h"

namespace small_attention {

constexpr std::int64_t kRows = 2, kSeq = 256, kHeads = 8, kHeadDim = 16, kDim = kHeads * kHeadDim;
constexpr int kSteps = 5;

inline at::Tensor values(const std::string& name, std::vector<std::int64_t> shape, double deviation,
                         at::Device device) {
  const at::Tensor result = at::empty(shape);
  phalanx::fill(result, phalanx::Init::normal(0.0, deviation), /*seed=*/1, name);
  return result.to(device);
}

struct Model {
  explicit Model(at::Device device) {
    const auto add = [&](const std::string& name) {
      const double deviation = 1 / std::sqrt(static_cast<double>(kDim));
      parameters.push_back({name, values(name, {kDim, kDim}, deviation, device).requires_grad_()});
      return parameters.back().tensor;
    };
    wq = add("wq"), wk = add("wk"), wv = add("wv"), wo = add("wo");
  }
  at::Tensor wq, wk, wv, wo;
  std::vector<phalanx::NamedTensor> parameters;
};

/// [rows, positions, dim] -> [rows, heads, positions, head_dim]
inline at::Tensor heads_of(const at::Tensor& x, const at::Tensor& weight) {
  return at::matmul(x, weight).unflatten(2, {kHeads, kHeadDim}).transpose(1, 2);
}
/// Of some positions: this rank's addend of the loss. `attended` [rows, heads, positions, head_dim].
inline at::Tensor loss_of(const at::Tensor& attended, const at::Tensor& wo, const at::Tensor& x) {
  return (at::matmul(attended.transpose(1, 2).flatten(2), wo) - x).square().sum() / (kRows * kSeq * kDim);
}

inline at::Tensor input(at::Device device) { return values("x", {kRows, kSeq, kDim}, 1, device); }

/// Which positions a rank has: a piece from the head of the sequence and one from its tail, so that in causal attention
/// all ranks have as much to do.
inline at::Tensor positions_of(std::int64_t rank, int ranks, at::Device device) {
  const std::int64_t piece = recipe::share_of(kSeq / 2, ranks, "pairs of positions"),
                     tail = (2 * ranks - 1 - rank) * piece;
  const auto numbers = at::TensorOptions(at::kLong).device(device);
  return at::cat({at::arange(rank * piece, (rank + 1) * piece, numbers), at::arange(tail, tail + piece, numbers)});
}

/// The losses of AdamW. `backward` makes gradients and returns the loss of all positions.
template <class Backward>
std::vector<double> train(const Model& model, const Backward& backward) {
  phalanx::AdamW optimizer(model.parameters);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    losses.push_back(backward(step));
    optimizer.step(1e-2);
    optimizer.zero_grad();
  }
  return losses;
}

/// The same for ranks that each have some positions: their losses and gradients are summed.
template <class Backward>
std::vector<double> train_together(const Model& model, phalanx::Communicator& world, const Backward& backward) {
  return train(model, [&](int step) {
    const at::Tensor loss = backward(step);
    world.all_reduce(loss);
    for (const phalanx::NamedTensor& one : model.parameters) world.all_reduce(one.tensor.grad());
    return loss.template item<double>();
  });
}

inline std::vector<double> one_rank(at::Device device) {
  const Model model(device);
  const at::Tensor x = input(device);
  return train(model, [&](int) {
    const at::Tensor attended =
        at::scaled_dot_product_attention(heads_of(x, model.wq), heads_of(x, model.wk), heads_of(x, model.wv),
                                         /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    const at::Tensor loss = loss_of(attended, model.wo, x);
    loss.backward();
    return loss.item<double>();
  });
}

}  // namespace small_attention
