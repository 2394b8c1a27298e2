// SmallNet: the net that the sections train. Four square layers y = gelu(x W^T), with the loss mean(y^2).
//
// Weights and batches are functions of fixed names, so every rank and every layout can compare its numbers.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/lecture/stage.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/optim/adamw.h"

namespace phalanx::lecture {

constexpr int kLayers = 4, kTrainingSteps = 5;
constexpr std::int64_t kDim = 64, kBatch = 32;
constexpr std::uint64_t kSeed = 1;

/// The layers [begin, end), under their numbers in the whole net.
struct SmallNet : nn::Module {
  explicit SmallNet(at::Device device, int begin = 0, int end = kLayers) : Module("SmallNet") {
    for (int i = begin; i < end; ++i) {
      layers.push_back(register_module(
          std::to_string(i),
          std::make_shared<nn::Linear>(nn::LinearOptions{kDim, kDim}, nn::TensorOptionsOfModule{.device = device})));
      layers.back()->set_init("weight", Init::normal(0.0, 0.125));  // 1 / sqrt(kDim)
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      x = nn::call(layers[i], x);
      if (with_output) with_output(i, x);
      x = at::gelu(x);
    }
    return x;
  }
  std::function<void(std::size_t layer, const at::Tensor& output)> with_output;  // to hook it
  std::vector<std::shared_ptr<nn::Linear>> layers;
};

/// Rows [first, first + count) of the batch that every step uses: [count, kDim].
inline at::Tensor batch_rows(at::Device device, std::int64_t first = 0, std::int64_t count = kBatch) {
  at::Tensor x = at::empty({count, kDim}, at::TensorOptions(at::kFloat).device(device));
  fill(x, Init::normal(0.0, 1.0), kSeed, "x", first * kDim);
  return x;
}

inline at::Tensor loss_of(const at::Tensor& y) { return y.square().mean(); }

/// Over all ranks.
inline DeviceMesh mesh_of(const Rank& rank, std::vector<MeshAxis> axes) {
  return {rank.world(), std::move(axes), c10::DeviceTypeName(rank.device().type(), /*lower_case=*/true)};
}

/// Some steps of AdamW. `loss` computes this rank's loss; its result is backpropagated.
inline std::vector<double> train(const std::vector<NamedTensor>& parameters, const std::function<at::Tensor()>& loss) {
  AdamW optimizer(parameters, {.weight_decay = 0.01});
  std::vector<double> losses;
  for (int step = 0; step < kTrainingSteps; ++step) {
    const at::Tensor now = loss();
    now.backward();
    optimizer.step(1e-3);
    optimizer.zero_grad();
    losses.push_back(now.item<double>());
  }
  return losses;
}

/// What one rank gets for the whole batch.
inline std::vector<double> losses_of_one_rank(at::Device device) {
  SmallNet net(device);
  nn::initialise(net, kSeed);
  const at::Tensor x = batch_rows(device);
  return train(nn::named_parameters(net), [&] { return loss_of(nn::call(net, x)); });
}

/// Whether the losses differ by at most 1e-5 of their size.
inline bool same_losses(const std::vector<double>& found, const std::vector<double>& expected) {
  bool same = found.size() == expected.size();
  for (std::size_t i = 0; same && i < found.size(); ++i) same = std::abs(found[i] - expected[i]) <= 1e-5 * expected[i];
  return same;
}

}  // namespace phalanx::lecture
