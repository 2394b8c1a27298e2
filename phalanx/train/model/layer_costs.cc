#include "phalanx/train/model/layer_costs.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/tensor/init.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/train/model/recompute_layers.h"
#include "phalanx/train/ranks/first_rank.h"

namespace phalanx::train {
namespace {

constexpr int kRuns = 5;

double seconds_of(const config::TrainConfig& config, const models::LlamaConfig& model, const models::LlamaPart& part,
                  std::int64_t sequences, at::Device device) {
  models::Llama built(model, part, nn::TensorOptionsOfModule{.dtype = weights_dtype(config), .device = device});
  recompute_layers(built, config);
  nn::initialise(built, 1);
  const std::int64_t seq = config.training.seq_len;
  const auto values = [&](const std::string& name) {
    at::Tensor x = at::empty({sequences, seq, model.dim}, at::TensorOptions(weights_dtype(config)).device(device));
    fill(x, Init::normal(0.0, 1.0), 1, name);
    return x;
  };
  const at::Tensor x = values("input").requires_grad_(), dy = part.head ? at::Tensor() : values("gradient");
  const at::Tensor labels = at::zeros({sequences, seq}, at::TensorOptions(at::kLong).device(device));
  const at::AutoGradMode record(true);
  double least = std::numeric_limits<double>::infinity();
  for (int run = 0; run <= kRuns; ++run) {
    x.mutable_grad().reset();
    const auto begin = std::chrono::steady_clock::now();
    if (part.head) {
      built.loss(x, labels).backward();
    } else {
      built.forward(x).backward(dy);
    }
    if (!device.is_cpu()) x.grad().sum().item();  // waits until the device is done
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (run > 0) least = std::min(least, seconds);  // the first run allocates buffers and tables
  }
  return least;
}

}  // namespace

std::vector<double> measure_layer_costs(const config::TrainConfig& config, const models::LlamaConfig& model,
                                        std::int64_t sequences, c10::Device device, Communicator& world) {
  std::vector<double> costs(static_cast<std::size_t>(2 * model.n_layers + 1));
  on_first_rank(world, [&] {
    const std::int64_t every = config::recompute_every(config);
    std::map<std::tuple<bool, std::int64_t, std::int64_t>, double> known;  // whether recomputed, which half, its window
    for (std::int64_t half = 0; half < 2 * model.n_layers; ++half) {
      const auto [entry, is_new] =
          known.try_emplace({every > 0 && half / 2 % every == 0, half % 2, model.window_of(half / 2)}, 0.0);
      if (is_new) {
        entry->second = seconds_of(config, model, {.begin = half, .end = half + 1}, sequences, device);
      }
      costs[static_cast<std::size_t>(half)] = entry->second;
    }
    const std::int64_t halves = 2 * model.n_layers;
    costs.back() = seconds_of(config, model, {.begin = halves, .end = halves, .head = true}, sequences, device);
  });
  const std::size_t bytes = costs.size() * sizeof(double);
  const std::string told = world.broadcast_bytes(std::string(reinterpret_cast<const char*>(costs.data()), bytes));
  std::memcpy(costs.data(), told.data(), bytes);
  return costs;
}

}  // namespace phalanx::train
