// A small mixture of experts, one for each row: h = x W, y = p_e gelu(h E_e) of the likeliest expert e,
// loss mean((y - x)^2). Everything is a function of fixed seeds, so that programs and ranks can compare their numbers.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/max.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "phalanx/optim/adamw.h"
#include "phalanx/tensor/init.h"

namespace small_mixture {

constexpr std::int64_t kRows = 512, kDim = 128, kExperts = 8;
constexpr int kSteps = 5;

inline at::Tensor values(const std::string& name, std::vector<std::int64_t> shape, double deviation,
                         at::Device device) {
  const at::Tensor result = at::empty(shape);
  phalanx::fill(result, phalanx::Init::normal(0.0, deviation), /*seed=*/1, name);
  return result.to(device);
}

struct Model {
  Model(std::int64_t first, std::int64_t count, at::Device device) {
    const double deviation = 1 / std::sqrt(static_cast<double>(kDim));
    const auto add = [&](const std::string& name, std::vector<std::int64_t> shape) {
      parameters.push_back({name, values(name, std::move(shape), deviation, device).requires_grad_()});
      return parameters.back().tensor;
    };
    weight = add("weight", {kDim, kDim});
    router = add("router", {kDim, kExperts});
    for (std::int64_t e = first; e < first + count; ++e)
      experts.push_back(add(fmt::format("expert{}", e), {kDim, kDim}));
  }
  at::Tensor weight, router;
  std::vector<at::Tensor> experts;  // this rank's
  std::vector<phalanx::NamedTensor> parameters;
};

inline at::Tensor loss_of(const at::Tensor& y, const at::Tensor& x) { return (y - x).square().sum() / (kRows * kDim); }

/// The probability of each row's likeliest expert, and its number: [rows] each.
inline std::tuple<at::Tensor, at::Tensor> choose(const at::Tensor& h, const at::Tensor& router) {
  return at::max(at::softmax(at::mm(h, router), -1), -1);
}

/// The losses of AdamW. `backward` makes gradients and returns the loss of all rows.
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

/// Every expert computes every row, and all but one count nothing.
inline std::vector<double> one_rank(at::Device device) {
  const Model model(0, kExperts, device);
  const at::Tensor x = values("x", {kRows, kDim}, 1, device);
  return train(model, [&](int) {
    const at::Tensor h = at::mm(x, model.weight);
    const auto [probability, expert] = choose(h, model.router);
    at::Tensor y = at::zeros_like(x);
    for (std::int64_t e = 0; e < kExperts; ++e) {
      y = y + at::gelu(at::mm(h, model.experts[e])) * (probability * (expert == e)).unsqueeze(1);
    }
    const at::Tensor loss = loss_of(y, x);
    loss.backward();
    return loss.item<double>();
  });
}

}  // namespace small_mixture
