// A deep network that is sharded over the ranks: it has the losses of data parallelism and a fraction of its memory.
//
// Each block of the Sequential is a unit: it is unsharded when it is used, and resharded after it.
//
//   $ phalanx launch --nproc-per-node 2 -- sharded_sequential        # parameters, gradients, optimizer state
//   2 rank(s): loss 0.000331; rank 0 trains 50 % of the parameters
//   $ phalanx launch --nproc-per-node 2 -- sharded_sequential ddp    # every rank has them all
//   2 rank(s): loss 0.000331; rank 0 trains 100 % of the parameters
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <string>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "recipes/recipe.h"

namespace {

torch::nn::Sequential deep_net() {
  torch::nn::Sequential model;
  for (int layer = 0; layer < 8; ++layer) {
    model->push_back(torch::nn::Linear(128, 128));
    model->push_back(torch::nn::Tanh());
  }
  model->push_back(torch::nn::Linear(128, 1));
  return model;
}

bool train(const phalanx::ProcessContext& context, bool shard) {
  torch::manual_seed(1);
  torch::nn::Sequential model = deep_net();
  model->to(context.device);

  std::unique_ptr<phalanx::DistributedDataParallel> ddp;
  std::unique_ptr<phalanx::FullyShardedDataParallel> sharded;
  if (shard) {
    const phalanx::DeviceMesh mesh(context.world, {{"dp_shard", context.world_size}});
    sharded = std::make_unique<phalanx::FullyShardedDataParallel>(*model, mesh);
  } else {
    ddp = std::make_unique<phalanx::DistributedDataParallel>(*model, context.world);
  }
  const auto& parameters = shard ? sharded->parameters() : ddp->parameters();
  phalanx::AdamW optimizer(parameters, {.weight_decay = 0.0});

  const int64_t batch = 64, share = recipe::share_of(batch, context.world_size);
  const auto inputs = torch::randn({batch, 128}).to(context.device);  // the same data on every rank
  const auto targets = inputs.narrow(1, 0, 1).sin();
  const auto x = inputs.narrow(0, context.rank * share, share), y = targets.narrow(0, context.rank * share, share);

  double loss_now = 0;
  for (int step = 0; step < 60; ++step) {
    auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    optimizer.step(1e-3);
    optimizer.zero_grad();
    auto mean = loss.detach().clone();
    context.world->all_reduce(mean, {.op = phalanx::ReduceOp::avg});
    loss_now = mean.item<double>();
  }
  int64_t mine = 0;
  for (const auto& parameter : parameters) mine += parameter.tensor.numel();
  if (context.rank == 0) {
    std::printf("%d rank(s): loss %.6f; rank 0 trains %.0f %% of the parameters\n", context.world_size, loss_now,
                100.0 * static_cast<double>(mine) / (8.0 * (128 * 128 + 128) + 129));
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::string how = "fsdp";
  recipe::Program program;
  program.add_option("how", how, "fsdp: sharded; ddp: every rank has it all")->check(CLI::IsMember({"fsdp", "ddp"}));
  return program.run(argc, argv, [&](const auto& context) { return train(context, how == "fsdp"); });
}
