// MnistNet, which can be made deep: then `depth` blocks x + relu(W x) / depth of one size lie between its fully
// connected layers, so that no layer is most of the net. With a depth of 8 the largest layer has 12 % of 9.7 million
// parameters; in MnistNet it has 98 %.
#pragma once

#include <ATen/ops/log_softmax.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/models/image_nets.h"

struct DeepMnistNet : phalanx::models::MnistNet {
  static constexpr std::int64_t kWidth = 1024;

  /// A depth of 0 is MnistNet itself.
  DeepMnistNet(int depth, phalanx::nn::TensorOptionsOfModule tensor) : MnistNet(tensor) {
    if (depth == 0) return;
    widen = register_module("widen", linear(128, kWidth, tensor));
    for (int i = 0; i < depth; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), linear(kWidth, kWidth, tensor)));
    }
    fc2 = replace_module("fc2", linear(kWidth, 10, tensor));
  }

  at::Tensor forward(const at::Tensor& images) {  // [batch, 1, 28, 28] -> [batch, 10]
    using phalanx::nn::call;
    if (blocks.empty()) return MnistNet::forward(images);
    at::Tensor x = at::relu(call(conv2, at::relu(call(conv1, images))));  // [batch, 64, 24, 24]
    x = call(dropout1, at::max_pool2d(x, 2)).flatten(1);                  // [batch, 9216]
    x = at::relu(call(widen, call(dropout2, at::relu(call(fc1, x)))));    // [batch, width]
    for (const auto& block : blocks) x = x + at::relu(call(block, x)) / static_cast<double>(blocks.size());
    return at::log_softmax(call(fc2, x), /*dim=*/1);
  }

  std::vector<std::vector<phalanx::nn::Module*>> shard_units() override {
    auto units = MnistNet::shard_units();
    units.pop_back();
    if (widen) units.push_back({widen.get()});
    for (const auto& block : blocks) units.push_back({block.get()});
    units.push_back({fc2.get()});
    return units;
  }

  std::shared_ptr<phalanx::nn::Linear> widen;
  std::vector<std::shared_ptr<phalanx::nn::Linear>> blocks;

 private:
  static std::shared_ptr<phalanx::nn::Linear> linear(std::int64_t in, std::int64_t out,
                                                     phalanx::nn::TensorOptionsOfModule tensor) {
    auto layer = std::make_shared<phalanx::nn::Linear>(phalanx::nn::LinearOptions{in, out, /*bias=*/true}, tensor);
    const double bound = 1 / std::sqrt(static_cast<double>(in));
    for (const char* name : {"weight", "bias"}) layer->set_init(name, phalanx::Init::uniform(-bound, bound));
    return layer;
  }
};
