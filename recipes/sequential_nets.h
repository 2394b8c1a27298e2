// The CNN of the other recipes and a toy of two layers, each as a torch::nn::Sequential that can be cut in two.
//
// A pipeline's batches all have one size. So one of fewer rows is filled up with rows of zeros whose label is kNoLabel,
// which add nothing to the loss: the loss of a micro-batch is the sum over its rows, divided by the rows of the batch.
#pragma once

#include <ATen/ops/constant_pad_nd.h>
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

constexpr std::int64_t kNoLabel = -100;

/// What a step trains on: `rows` rows, filled up to the size of a batch.
struct FullBatch {
  at::Tensor x, y;
  std::int64_t rows = 0;
};

inline FullBatch filled_up(const at::Tensor& images, const at::Tensor& labels, std::int64_t batch) {
  const std::int64_t missing = batch - images.size(0);
  return {at::constant_pad_nd(images, {0, 0, 0, 0, 0, 0, 0, missing}),
          at::constant_pad_nd(labels, {0, missing}, kNoLabel), images.size(0)};
}

struct SequentialNet {
  torch::nn::Sequential layers;
  std::vector<int> parts;              // children of each of the two
  std::shared_ptr<std::int64_t> rows;  // of the batch that comes next
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
  const auto rows = std::make_shared<std::int64_t>();
  return {layers, {3, 7}, rows, [rows](const at::Tensor& y, const at::Tensor& labels) {
            return at::cross_entropy_loss(y, labels, {}, at::Reduction::Sum, kNoLabel) / static_cast<double>(*rows);
          }};
}

/// Linear(16, 8) | Linear(8, 4)
inline SequentialNet sequential_toy(at::Device device) {
  using phalanx::nn::Linear, phalanx::nn::LinearOptions;
  const phalanx::nn::TensorOptionsOfModule here{.device = device};
  torch::nn::Sequential layers(std::make_shared<Linear>(LinearOptions{16, 8, true}, here),
                               std::make_shared<Linear>(LinearOptions{8, 4, true}, here));
  phalanx::nn::initialise(*layers, /*seed=*/1);
  const auto rows = std::make_shared<std::int64_t>();
  return {layers, {1, 1}, rows, [rows](const at::Tensor& y, const at::Tensor& target) {
            return at::mse_loss(y, target, at::Reduction::Sum) / static_cast<double>(*rows * y.size(1));
          }};
}
