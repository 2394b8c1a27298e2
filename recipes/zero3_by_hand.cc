// ZeRO-3 written out, and the same through the library.
//
//   phalanx launch --nproc-per-node 2 -- zero3_by_hand                    also with 1 and 4
//
// By hand: layer i of the deep MLP is on rank i mod ranks, with its optimizer state. The other ranks get it by a
// broadcast, once in the forward pass and once in the backward pass, where the layer is recomputed from its input. Its
// gradient is reduced to the owner, which steps it. Through the library: FullyShardedDataParallel, which cuts every
// layer into rows instead, so that all ranks have work in every layer. Both give the losses of one rank.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <optional>

#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "recipes/deep_mlp.h"

namespace {

const phalanx::AdamWOptions kAdamW{.beta2 = 0.999, .weight_decay = 0.01};

class ByHand {
 public:
  explicit ByHand(phalanx::Communicator& world) : world_(world) {
    std::vector<phalanx::NamedTensor> mine;
    for (int i = 0; i < deep_mlp::kLayers; ++i) {
      if (owner(i) != world.rank()) continue;
      const std::string name = std::to_string(i) + ".weight";
      owned_[i] = at::empty({deep_mlp::kDim, deep_mlp::kDim});
      phalanx::fill(owned_[i], deep_mlp::weight_init(), deep_mlp::kSeed, name);
      mine.push_back({name, owned_[i]});
    }
    if (!mine.empty()) optimizer_.emplace(mine, kAdamW);
  }

  double step(at::Tensor x) {
    std::vector<at::Tensor> inputs;  // everything the backward pass needs
    {
      const at::NoGradGuard no_grad;
      for (int i = 0; i < deep_mlp::kLayers; ++i) {
        inputs.push_back(x);
        x = at::gelu(at::mm(x, borrow(i)));
      }
    }
    at::Tensor y = x.requires_grad_();
    const at::Tensor loss = deep_mlp::loss_of(y);
    loss.backward();
    at::Tensor dy = y.grad();
    for (int i = deep_mlp::kLayers - 1; i >= 0; --i) {
      const at::Tensor input = inputs[static_cast<std::size_t>(i)].detach().requires_grad_(i > 0);
      const at::Tensor weight = borrow(i).detach().requires_grad_();
      torch::autograd::backward({at::gelu(at::mm(input, weight))}, {dy});
      world_.reduce(weight.grad(), {.root = owner(i), .op = phalanx::ReduceOp::avg});
      if (owner(i) == world_.rank()) owned_[i].mutable_grad() = weight.grad();
      dy = input.grad();
    }
    if (optimizer_) optimizer_->step(1e-3), optimizer_->zero_grad();
    return deep_mlp::mean_over_ranks(loss, &world_);
  }

  std::int64_t elements() const { return static_cast<std::int64_t>(owned_.size()) * deep_mlp::kDim * deep_mlp::kDim; }

 private:
  int owner(int layer) const { return layer % world_.size(); }
  at::Tensor borrow(int layer) {
    at::Tensor weight = owner(layer) == world_.rank() ? owned_[layer] : at::empty({deep_mlp::kDim, deep_mlp::kDim});
    world_.broadcast(weight, {.root = owner(layer)});
    return weight;
  }

  phalanx::Communicator& world_;
  std::map<int, at::Tensor> owned_;  // by layer
  std::optional<phalanx::AdamW> optimizer_;
};

template <class Loss>
std::vector<double> losses_of(const std::vector<phalanx::NamedTensor>& parameters, phalanx::Communicator* world,
                              const Loss& loss_now) {
  phalanx::AdamW optimizer(parameters, kAdamW);
  std::vector<double> losses;
  for (int step = 0; step < deep_mlp::kSteps; ++step) {
    const at::Tensor loss = loss_now();
    loss.backward();
    optimizer.step(1e-3);
    optimizer.zero_grad();
    losses.push_back(deep_mlp::mean_over_ranks(loss, world));
  }
  return losses;
}

}  // namespace

int main() try {
  const phalanx::ProcessContext context = phalanx::init_from_environment({.device = "cpu"});
  auto& world = *context.world;
  const at::Tensor mine = deep_mlp::rows_of(context.rank, context.world_size);

  deep_mlp::Net net;
  for (const auto& layer : net.layers) phalanx::checkpoint_activations(*layer);
  const phalanx::DeviceMesh mesh(context.world, {{"dp_shard", context.world_size}});
  phalanx::FullyShardedDataParallel sharded(net, mesh);
  sharded.initialise(deep_mlp::kSeed);
  const auto forward = [](deep_mlp::Net& model, const at::Tensor& x) {
    return deep_mlp::loss_of(phalanx::nn::call(model, x));
  };
  const auto library = losses_of(sharded.parameters(), &world, [&] { return forward(net, mine); });
  std::vector<double> alone;
  if (context.rank == 0) {
    deep_mlp::Net whole;
    phalanx::nn::initialise(whole, deep_mlp::kSeed);
    const at::Tensor all = deep_mlp::rows_of(0, 1);
    alone = losses_of(phalanx::nn::named_parameters(whole), nullptr, [&] { return forward(whole, all); });
  }

  ByHand by_hand(world);
  double worst = 0;
  bool same = true;
  for (std::size_t step = 0; step < deep_mlp::kSteps; ++step) {
    const double hand = by_hand.step(mine);
    if (context.rank != 0) continue;
    for (const double loss : {hand, library[step]}) {
      const double difference = std::abs(loss - alone[step]) / alone[step];
      worst = std::max(worst, difference);
      same = same && difference <= 1e-5;  // not so for NaN
    }
    fmt::print("step {}: by hand {:.7f}, library {:.7f}, one rank {:.7f}\n", step + 1, hand, library[step],
               alone[step]);
  }
  std::int64_t rows = 0;
  for (const auto& parameter : sharded.parameters()) rows += parameter.tensor.numel();
  if (context.rank == 0) {
    fmt::print("{} rank(s): rank 0 keeps {} elements by hand, {} in the library, of {}; losses differ by {:.1e}: {}\n",
               context.world_size, by_hand.elements(), rows, deep_mlp::kLayers * deep_mlp::kDim * deep_mlp::kDim, worst,
               same ? "the same" : "NOT the same");
  }
  return same ? 0 : 1;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "zero3_by_hand: {}\n", error.what());
  return error.exit_status();
}
