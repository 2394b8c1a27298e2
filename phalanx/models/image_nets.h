// The two small image classifiers of the recipes. Parameters start without values: call nn::initialise(net, seed).
//
//   models::MnistNet net;
//   nn::initialise(net, 1);
//   at::Tensor loss = at::nll_loss(nn::call(net, images), labels);
//
// CifarNet, 136,874 parameters, logits:
//   conv 3 -> 16 (3 x 3, padded), ReLU, pool 2, conv 16 -> 32 (3 x 3, padded), ReLU, pool 2,
//   fc 2048 -> 64, ReLU, fc -> 10
// MnistNet, 1,199,882 parameters, log-probabilities:
//   conv 1 -> 32 (3 x 3), ReLU, conv 32 -> 64 (3 x 3), ReLU, pool 2, dropout 0.25,
//   fc 9216 -> 128, ReLU, dropout 0.5, fc -> 10
//
// Training MnistNet needs nn::set_dropout_rng_state() (nn/dropout.h) before each forward pass. Both are initialised as
// torch's layers are: uniform within 1 / sqrt(fan in). Each layer is a unit of FullyShardedDataParallel.
#pragma once

#include <memory>
#include <vector>

#include "phalanx/nn/conv2d.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/nn/linear.h"

namespace phalanx::models {

class CifarNet : public nn::Module {
 public:
  explicit CifarNet(nn::TensorOptionsOfModule tensor = {});
  at::Tensor forward(const at::Tensor& x);  // [batch, 3, 32, 32] -> [batch, 10]
  std::vector<std::vector<nn::Module*>> shard_units() override;

  std::shared_ptr<nn::Conv2d> conv1, conv2;
  std::shared_ptr<nn::Linear> fc1, fc2;
};

class MnistNet : public nn::Module {
 public:
  explicit MnistNet(nn::TensorOptionsOfModule tensor = {});
  at::Tensor forward(const at::Tensor& x);  // [batch, 1, 28, 28] -> [batch, 10]
  std::vector<std::vector<nn::Module*>> shard_units() override;

  std::shared_ptr<nn::Conv2d> conv1, conv2;
  std::shared_ptr<nn::Dropout> dropout1, dropout2;
  std::shared_ptr<nn::Linear> fc1, fc2;
};

}  // namespace phalanx::models
