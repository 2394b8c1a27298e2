// Data parallelism written out, and the one line that does the same.
//
// By hand: after backward(), all_reduce each gradient, divide by the number of ranks, step. A deep MLP is trained in
// that way, then with DistributedDataParallel, then by rank 0 alone on the whole batch. All three print the same
// losses, and the weights end up the same on all ranks. --per-rank shows that each rank has another loss, that of its
// own rows, and all the same parameters. Worlds of 1, 2 and 4: ddp_by_hand --spawn 1,2,4.
//
//   $ phalanx launch --nproc-per-node 2 -- ddp_by_hand --per-rank
//   rank 0: step 1: loss 0.0132066, layer 0 1024 x 1024 [0.017 -0.006 0.000 ...]
//   rank 1: step 1: loss 0.0128884, layer 0 1024 x 1024 [0.017 -0.006 0.000 ...]
//   rank 0: step 2: loss 0.0033815, layer 0 1024 x 1024 [0.018 -0.005 0.001 ...]
//   rank 1: step 2: loss 0.0033971, layer 0 1024 x 1024 [0.018 -0.005 0.001 ...]
//   rank 0: step 3: loss 0.0014989, layer 0 1024 x 1024 [0.019 -0.004 0.002 ...]
//   rank 1: step 3: loss 0.0015170, layer 0 1024 x 1024 [0.019 -0.004 0.002 ...]
//   rank 0: step 4: loss 0.0010683, layer 0 1024 x 1024 [0.019 -0.004 0.002 ...]
//   rank 1: step 4: loss 0.0010744, layer 0 1024 x 1024 [0.019 -0.004 0.002 ...]
//   rank 0: step 5: loss 0.0008409, layer 0 1024 x 1024 [0.019 -0.004 0.002 ...]
//   rank 1: step 5: loss 0.0008382, layer 0 1024 x 1024 [0.019 -0.004 0.002 ...]
//   step 1: by hand 0.0130475, wrapped 0.0130475, one rank 0.0130475
//   step 2: by hand 0.0033893, wrapped 0.0033893, one rank 0.0033893
//   step 3: by hand 0.0015080, wrapped 0.0015080, one rank 0.0015080
//   step 4: by hand 0.0010713, wrapped 0.0010713, one rank 0.0010713
//   step 5: by hand 0.0008396, wrapped 0.0008396, one rank 0.0008396
//   2 rank(s): parameters equal on all ranks; by hand and wrapped differ by 0.0e+00
//   losses differ from one rank's by 1.1e-07: the same
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>

#include "phalanx/parallel/ddp/ddp.h"
#include "recipes/deep_mlp.h"
#include "recipes/recipe.h"

namespace {

/// What DistributedDataParallel does, one gradient after the other.
void average_gradients(const deep_mlp::Net& net, phalanx::Communicator& world) {
  for (const at::Tensor& parameter : net.parameters()) {
    world.all_reduce(parameter.grad());
    parameter.mutable_grad().div_(world.size());
  }
}

std::vector<double> train_by_hand(deep_mlp::Net& net, const at::Tensor& x, phalanx::Communicator& world,
                                  bool per_rank) {
  int step = 0;
  return deep_mlp::train(phalanx::nn::named_parameters(net), [&] {
    const at::Tensor loss = deep_mlp::loss_of(phalanx::nn::call(net, x));  // of this rank's rows
    loss.backward();
    average_gradients(net, world);
    if (per_rank) {
      recipe::print_by_rank(world, fmt::format("step {}: loss {:.7f}, layer 0 {}", ++step, loss.item<double>(),
                                               recipe::summary(net.layers[0]->weight)));
    }
    return deep_mlp::mean_over_ranks(loss, &world);
  });
}

std::vector<double> train_wrapped(deep_mlp::Net& net, const at::Tensor& x,
                                  const std::shared_ptr<phalanx::Communicator>& world) {
  const phalanx::DistributedDataParallel ddp(net, world);  // the one line
  return deep_mlp::train(phalanx::nn::named_parameters(net), [&] {
    const at::Tensor loss = deep_mlp::loss_of(phalanx::nn::call(net, x));
    loss.backward();
    return deep_mlp::mean_over_ranks(loss, world.get());
  });
}

bool equal_on_all_ranks(const deep_mlp::Net& net, phalanx::Communicator& world) {
  const at::NoGradGuard no_grad;
  bool equal = true;
  for (const at::Tensor& parameter : net.parameters()) {
    at::Tensor of_rank_0 = parameter.clone();
    world.broadcast(of_rank_0);
    equal = equal && at::equal(of_rank_0, parameter);
  }
  at::Tensor everywhere = at::full({1}, equal ? 1.0F : 0.0F, net.layers[0]->weight.options());
  world.all_reduce(everywhere, {.op = phalanx::ReduceOp::min});
  return everywhere.item<double>() == 1.0;
}

double largest_difference(const deep_mlp::Net& a, const deep_mlp::Net& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    largest = std::max(largest, (a.layers[i]->weight - b.layers[i]->weight).abs().max().item<double>());
  }
  return largest;
}

bool compare(const phalanx::ProcessContext& context, bool per_rank) {
  const at::Tensor mine = deep_mlp::rows_of(context.rank, context.world_size, context.device);
  deep_mlp::Net by_hand(context.device), wrapped(context.device);
  for (deep_mlp::Net* net : {&by_hand, &wrapped}) phalanx::nn::initialise(*net, deep_mlp::kSeed);
  const auto losses = train_by_hand(by_hand, mine, *context.world, per_rank);
  const auto wrapped_losses = train_wrapped(wrapped, mine, context.world);
  const bool equal = equal_on_all_ranks(by_hand, *context.world);
  if (context.rank != 0) return equal;
  const double from_wrapped = largest_difference(by_hand, wrapped);
  const double from_alone = recipe::print_losses(
      {{"by hand", losses}, {"wrapped", wrapped_losses}, {"one rank", deep_mlp::train_alone(context.device)}});
  const bool good = equal && from_wrapped <= 1e-5 && from_alone <= 1e-5;
  fmt::print("{} rank(s): parameters {} on all ranks; by hand and wrapped differ by {:.1e}\n", context.world_size,
             equal ? "equal" : "NOT equal", from_wrapped);
  fmt::print("losses differ from one rank's by {:.1e}: {}\n", from_alone, recipe::verdict(good));
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  recipe::Program program;
  const bool& per_rank = program.add_per_rank_flag();
  return program.run(argc, argv, [&](const auto& context) { return compare(context, per_rank); });
}
