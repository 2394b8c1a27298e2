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

#include "phalanx/base/error.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/nn/module.h"
#include "phalanx/tensor/init.h"

namespace deep_mlp {

constexpr int kLayers = 4, kSteps = 5;
constexpr std::int64_t kBatch = 128, kDim = 1024;
constexpr std::uint64_t kSeed = 1;

inline phalanx::Init weight_init() { return phalanx::Init::normal(0.0, 1.0 / std::sqrt(static_cast<double>(kDim))); }

struct Layer : phalanx::nn::Module {
  Layer() : Module("Layer") { weight = make_parameter("weight", {kDim, kDim}, {}, weight_init()); }
  at::Tensor forward(const at::Tensor& x) { return at::gelu(at::mm(x, weight)); }  // [batch, dim]
  at::Tensor weight;
};

struct Net : phalanx::nn::Module {
  Net() : Module("DeepMlp") {
    for (int i = 0; i < kLayers; ++i) layers.push_back(register_module(std::to_string(i), std::make_shared<Layer>()));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers) x = phalanx::nn::call(layer, x);
    return x;
  }
  std::vector<std::shared_ptr<Layer>> layers;
};

/// This rank's rows of the one batch, which every step uses.
inline at::Tensor rows_of(int rank, int ranks) {
  if (kBatch % ranks != 0) {
    throw phalanx::UsageError("the batch of " + std::to_string(kBatch) + " rows goes to 1, 2, 4, 8 ... ranks, not to " +
                              std::to_string(ranks));
  }
  const at::Tensor x = at::empty({kBatch, kDim});
  phalanx::fill(x, phalanx::Init::normal(0.0, 1.0), kSeed, "x");
  return x.narrow(0, rank * (kBatch / ranks), kBatch / ranks);
}

inline at::Tensor loss_of(const at::Tensor& y) { return y.square().mean(); }

/// The mean over the ranks' losses; without a world this rank's loss.
inline double mean_over_ranks(const at::Tensor& loss, phalanx::Communicator* world) {
  at::Tensor mean = loss.detach().clone();
  if (world != nullptr) world->all_reduce(mean, {.op = phalanx::ReduceOp::avg});
  return mean.item<double>();
}

}  // namespace deep_mlp
