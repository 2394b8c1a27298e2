// A plain libtorch program that becomes data parallel by one line.
//
//   ddp_one_line                                       one process
//   phalanx launch --nproc-per-node 2 -- ddp_one_line  two, each on half of every batch: the same losses
//
// The first line of main() finds the other ranks; "the one line" is all that training itself needs. Each rank must use
// its own share of the batch, as below.
#include <torch/torch.h>

#include <cstdio>

#include "phalanx/launch/process_context.h"
#include "phalanx/parallel/ddp/ddp.h"

int main() {
  const phalanx::ProcessContext context = phalanx::init_from_environment();

  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  phalanx::DistributedDataParallel ddp(*model, context.world);  // the one line

  const int64_t batch = 64, share = batch / context.world_size;
  torch::manual_seed(1);  // the same data on every rank
  const auto inputs = torch::randn({batch, 16});
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
  if (context.rank == 0) {
    std::printf("%d rank(s): loss %.4f -> %.4f: %s\n", context.world_size, first, last,
                last < 0.05 * first ? "learned" : "did not learn");
  }
  return last < 0.05 * first ? 0 : 1;
}
