// The deep MLP of several recipes: layers x -> gelu(x W), W = randn / sqrt(dim), loss mean(x^2). Everything is a
// function of fixed seeds, so that programs and ranks can compare their numbers.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/module.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/tensor/init.h"
#include "recipes/recipe.h"

namespace deep_mlp {

constexpr int kLayers = 4, kSteps = 5;
constexpr std::int64_t kBatch = 128, kDim = 1024;
constexpr std::uint64_t kSeed = 1;

inline phalanx::Init weight_init() { return phalanx::Init::normal(0.0, 1.0 / std::sqrt(static_cast<double>(kDim))); }

struct Layer : phalanx::nn::Module {
  explicit Layer(at::Device device) : Module("Layer") {
    weight = make_parameter("weight", {kDim, kDim}, {.device = device}, weight_init());
  }
  at::Tensor forward(const at::Tensor& x) { return at::gelu(at::mm(x, weight)); }  // [batch, dim]
  at::Tensor weight;
};

/// Layers [begin, end), under their numbers in the whole model.
struct Net : phalanx::nn::Module {
  explicit Net(at::Device device, int begin = 0, int end = kLayers) : Module("DeepMlp") {
    for (int i = begin; i < end; ++i) {
      layers.push_back(register_module(std::to_string(i), std::make_shared<Layer>(device)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = phalanx::nn::call(layer, x);
    return x;
  }
  std::vector<std::shared_ptr<Layer>> layers;
};

/// This rank's rows of the one batch, which every step uses. Throws UsageError if the ranks do not divide the batch.
inline at::Tensor rows_of(int rank, int ranks, at::Device device) {
  const std::int64_t share = recipe::share_of(kBatch, ranks);
  const at::Tensor x = at::empty({kBatch, kDim});
  phalanx::fill(x, phalanx::Init::normal(0.0, 1.0), kSeed, "x");
  return x.narrow(0, rank * share, share).to(device);
}

inline at::Tensor loss_of(const at::Tensor& y) { return y.square().mean(); }

/// The mean over the ranks' losses; without a world this rank's loss.
inline double mean_over_ranks(const at::Tensor& loss, phalanx::Communicator* world) {
  at::Tensor mean = loss.detach().clone();
  if (world != nullptr) world->all_reduce(mean, {.op = phalanx::ReduceOp::avg});
  return mean.item<double>();
}

/// The losses of five steps of AdamW on `parameters`. `backward` does one forward and backward pass and returns the
/// mean loss of the batch.
template <class Backward>
std::vector<double> train(const std::vector<phalanx::NamedTensor>& parameters, const Backward& backward) {
  phalanx::AdamW optimizer(parameters, {.beta2 = 0.999, .weight_decay = 0.01});
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    losses.push_back(backward());
    optimizer.step(1e-3);
    optimizer.zero_grad();
  }
  return losses;
}

/// The losses of one rank on the whole batch.
inline std::vector<double> train_alone(at::Device device) {
  Net net(device);
  phalanx::nn::initialise(net, kSeed);
  const at::Tensor x = rows_of(0, 1, device);
  return train(phalanx::nn::named_parameters(net), [&] {
    const at::Tensor loss = loss_of(phalanx::nn::call(net, x));
    loss.backward();
    return loss.item<double>();
  });
}

}  // namespace deep_mlp
