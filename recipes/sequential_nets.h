// The CNN of the other recipes and a toy of two layers, each as a torch::nn::Sequential that can be cut in two.
#pragma once

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <vector>

#include "phalanx/models/image_nets.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/pipeline/sequential_pipeline.h"

struct SequentialNet {
  torch::nn::Sequential layers;
  std::vector<int> parts;  // children of each of the two
  phalanx::SequentialPipeline::Loss loss;
};

/// CifarNet, cut after its first pool.
inline SequentialNet sequential_cnn(at::Device device) {
  phalanx::models::CifarNet net({.device = device});
  phalanx::nn::initialise(net, /*seed=*/1);
  using torch::nn::Functional;
  const auto pool = [](const at::Tensor& x) { return at::max_pool2d(x, 2); };
  const auto flatten = [](const at::Tensor& x) { return x.flatten(1); };
  const auto relu = [](const at::Tensor& x) { return at::relu(x); };
  torch::nn::Sequential layers({{"conv1", net.conv1},
                                {"relu1", Functional(relu)},
                                {"pool1", Functional(pool)},
                                {"conv2", net.conv2},
                                {"relu2", Functional(relu)},
                                {"pool2", Functional(pool)},
                                {"flatten", Functional(flatten)},
                                {"fc1", net.fc1},
                                {"relu3", Functional(relu)},
                                {"fc2", net.fc2}});
  return {
      layers, {3, 7}, [](const at::Tensor& y, const at::Tensor& labels) { return at::cross_entropy_loss(y, labels); }};
}

/// Linear(16, 8) | Linear(8, 4)
inline SequentialNet sequential_toy(at::Device device) {
  using phalanx::nn::Linear, phalanx::nn::LinearOptions;
  const phalanx::nn::TensorOptionsOfModule here{.device = device};
  torch::nn::Sequential layers(std::make_shared<Linear>(LinearOptions{16, 8, true}, here),
                               std::make_shared<Linear>(LinearOptions{8, 4, true}, here));
  phalanx::nn::initialise(*layers, /*seed=*/1);
  return {layers, {1, 1}, [](const at::Tensor& y, const at::Tensor& target) { return at::mse_loss(y, target); }};
}
