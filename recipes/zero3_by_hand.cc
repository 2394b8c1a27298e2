// ZeRO-3 written out, and the same through the library.
//
// By hand: layer i of the deep MLP is on rank i mod ranks, with its optimizer state. The other ranks get it by a
// broadcast, once in the forward pass and once in the backward pass, where the layer is recomputed from its input. Its
// gradient is reduced to the owner, which steps it. Through the library: FullyShardedDataParallel, which cuts every
// layer into rows instead, so that all ranks have work in every layer. Both give the losses of one rank. --per-rank
// shows what each rank owns and borrows in the first step. Worlds of 1, 2 and 4: zero3_by_hand --spawn 1,2,4.
// Below, "..." stands for lines left out; recipes/expected/zero3_by_hand.txt has them all.
//
//   $ phalanx launch --nproc-per-node 2 -- zero3_by_hand --per-rank
//   rank 0: forward, layer 0: owns 1024 x 1024 [0.017 -0.006 0.000 ...]
//   rank 0: forward, layer 1: borrows 1024 x 1024 [0.028 -0.044 0.020 ...]
//   ...
//   rank 1: forward, layer 0: borrows 1024 x 1024 [0.017 -0.006 0.000 ...]
//   rank 1: forward, layer 1: owns 1024 x 1024 [0.028 -0.044 0.020 ...]
//   ...
//   rank 1: backward, layer 0: borrows 1024 x 1024 [0.017 -0.006 0.000 ...]
//   step 1: by hand 0.0130475, library 0.0130475, one rank 0.0130475
//   step 2: by hand 0.0033893, library 0.0033893, one rank 0.0033893
//   step 3: by hand 0.0015080, library 0.0015080, one rank 0.0015080
//   step 4: by hand 0.0010713, library 0.0010713, one rank 0.0010713
//   step 5: by hand 0.0008396, library 0.0008396, one rank 0.0008396
//   2 rank(s): rank 0 keeps 2097152 elements by hand, 2097152 in the library, of 4194304
//   losses differ from one rank's by 1.1e-07: the same
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <optional>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "recipes/deep_mlp.h"
#include "recipes/recipe.h"

namespace {

class ByHand {
 public:
  ByHand(phalanx::Communicator& world, at::Device device) : world_(world), here_(device) {
    std::vector<phalanx::NamedTensor> mine;
    for (int i = 0; i < deep_mlp::kLayers; ++i) {
      if (owner(i) != world.rank()) continue;
      const std::string name = std::to_string(i) + ".weight";
      owned_[i] = at::empty({deep_mlp::kDim, deep_mlp::kDim}, here_);
      phalanx::fill(owned_[i], deep_mlp::weight_init(), deep_mlp::kSeed, name);
      mine.push_back({name, owned_[i]});
    }
    if (!mine.empty()) optimizer_.emplace(mine, phalanx::AdamWOptions{.beta2 = 0.999, .weight_decay = 0.01});
  }

  std::int64_t elements() const { return static_cast<std::int64_t>(owned_.size()) * deep_mlp::kDim * deep_mlp::kDim; }
  std::string log() const { return log_; }

  double step(const at::Tensor& x) {
    std::vector<at::Tensor> inputs;  // everything the backward pass needs
    const at::Tensor y = forward(x, inputs).requires_grad_();
    const at::Tensor loss = deep_mlp::loss_of(y);
    loss.backward();
    backward(inputs, y.grad());
    if (optimizer_) optimizer_->step(1e-3), optimizer_->zero_grad();
    return deep_mlp::mean_over_ranks(loss, &world_);
  }

 private:
  at::Tensor forward(at::Tensor x, std::vector<at::Tensor>& inputs) {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < deep_mlp::kLayers; ++i) {
      inputs.push_back(x);
      x = at::gelu(at::mm(x, borrow(i, "forward")));
    }
    return x;
  }

  void backward(const std::vector<at::Tensor>& inputs, at::Tensor dy) {
    for (int i = deep_mlp::kLayers - 1; i >= 0; --i) {
      const at::Tensor input = inputs[static_cast<std::size_t>(i)].detach().requires_grad_(i > 0);
      const at::Tensor weight = borrow(i, "backward").detach().requires_grad_();
      torch::autograd::backward({at::gelu(at::mm(input, weight))}, {dy});
      world_.reduce(weight.grad(), {.root = owner(i), .op = phalanx::ReduceOp::avg});
      if (is_mine(i)) owned_[i].mutable_grad() = weight.grad();
      dy = input.grad();
    }
  }

  /// The layer's weight; on the other ranks memory that lasts until it has been used.
  at::Tensor borrow(int layer, const char* pass) {
    at::Tensor weight = is_mine(layer) ? owned_[layer] : at::empty({deep_mlp::kDim, deep_mlp::kDim}, here_);
    world_.broadcast(weight, {.root = owner(layer)});
    log_ +=
        fmt::format("{}, layer {}: {} {}\n", pass, layer, is_mine(layer) ? "owns" : "borrows", recipe::summary(weight));
    return weight;
  }
  int owner(int layer) const { return layer % world_.size(); }
  bool is_mine(int layer) const { return owner(layer) == world_.rank(); }

  phalanx::Communicator& world_;
  at::TensorOptions here_;
  std::map<int, at::Tensor> owned_;  // by layer
  std::optional<phalanx::AdamW> optimizer_;
  std::string log_;
};

/// Losses, and how many elements of the parameters this rank keeps.
std::pair<std::vector<double>, std::int64_t> train_by_library(const phalanx::ProcessContext& context,
                                                              const at::Tensor& x) {
  deep_mlp::Net net(context.device);
  for (const auto& layer : net.layers) phalanx::checkpoint_activations(*layer);
  const phalanx::DeviceMesh mesh(context.world, {{"dp_shard", context.world_size}});
  phalanx::FullyShardedDataParallel sharded(net, mesh);
  sharded.initialise(deep_mlp::kSeed);
  std::int64_t kept = 0;
  for (const auto& parameter : sharded.parameters()) kept += parameter.tensor.numel();
  const auto losses = deep_mlp::train(sharded.parameters(), [&] {
    const at::Tensor loss = deep_mlp::loss_of(phalanx::nn::call(net, x));
    loss.backward();
    return deep_mlp::mean_over_ranks(loss, context.world.get());
  });
  return {losses, kept};
}

bool compare(const phalanx::ProcessContext& context, bool per_rank) {
  const at::Tensor mine = deep_mlp::rows_of(context.rank, context.world_size, context.device);
  ByHand by_hand(*context.world, context.device);
  std::vector<double> losses;
  for (int step = 0; step < deep_mlp::kSteps; ++step) {
    losses.push_back(by_hand.step(mine));
    if (per_rank && step == 0) recipe::print_by_rank(*context.world, by_hand.log());
  }
  const auto [library, kept] = train_by_library(context, mine);
  if (context.rank != 0) return true;
  const double apart = recipe::print_losses(
      {{"by hand", losses}, {"library", library}, {"one rank", deep_mlp::train_alone(context.device)}});
  fmt::print("{} rank(s): rank 0 keeps {} elements by hand, {} in the library, of {}\n", context.world_size,
             by_hand.elements(), kept, deep_mlp::kLayers * deep_mlp::kDim * deep_mlp::kDim);
  fmt::print("losses differ from one rank's by {:.1e}: {}\n", apart, recipe::verdict(apart <= 1e-5));
  return apart <= 1e-5;
}

}  // namespace

int main(int argc, char** argv) {
  recipe::Program program;
  const bool& per_rank = program.add_per_rank_flag();
  return program.run(argc, argv, [&](const auto& context) { return compare(context, per_rank); });
}
