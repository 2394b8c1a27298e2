// A plain libtorch program that becomes data parallel by one line.
//
//   $ ddp_one_line                                           # one process
//   1 rank(s): loss 0.7157 -> 0.0000: learned
//   $ phalanx launch --nproc-per-node 2 -- ddp_one_line      # two, each on half of every batch: the same losses
//   2 rank(s): loss 0.7157 -> 0.0000: learned
//
// Finding the other ranks comes before "the one line", which is all that training itself needs. Each rank must use its
// own share of the batch, as below.
#include <torch/torch.h>

#include <cstdio>

#include "phalanx/parallel/ddp/ddp.h"
#include "recipes/recipe.h"

namespace {

bool learn(const phalanx::ProcessContext& context) {
  torch::manual_seed(1);  // the same net and the same data on every rank
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  model->to(context.device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  phalanx::DistributedDataParallel ddp(*model, context.world);  // the one line

  const int64_t batch = 64, share = recipe::share_of(batch, context.world_size);
  const auto inputs = torch::randn({batch, 16}).to(context.device);
  const auto targets = inputs.narrow(1, 0, 1).sin();
  const auto x = inputs.narrow(0, context.rank * share, share), y = targets.narrow(0, context.rank * share, share);

  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    optimizer.step();
    auto mean = loss.detach().clone();
    context.world->all_reduce(mean, {.op = phalanx::ReduceOp::avg});
    (step == 0 ? first : last) = mean.item<double>();
  }
  const bool learned = last < 0.05 * first;
  if (context.rank == 0) {
    std::printf("%d rank(s): loss %.4f -> %.4f: %s\n", context.world_size, first, last,
                learned ? "learned" : "did not learn");
  }
  return learned;
}

}  // namespace

int main(int argc, char** argv) { return recipe::Program().run(argc, argv, learn); }
