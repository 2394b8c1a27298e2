// The job of torch's DDP tutorial: a linear layer on random pairs, a snapshot every few epochs, and a restart from the
// last snapshot.
//
//   phalanx launch -n 2 --max-restarts 3 -- ddp_tutorial 10 2               10 epochs, a snapshot after every second
//   phalanx launch -n 2 --max-restarts 3 -- ddp_tutorial 10 2 --crash-in 5  the last rank dies in epoch 5, once
//
// A run that crashed ends with the same bits as a run that did not. The tutorial uses the cross entropy of one class,
// which is zero whatever the net does; this program uses the squared error.
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/nn/module.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/ddp/ddp.h"

constexpr int64_t kPairs = 2048, kFeatures = 20;

int main(int argc, char** argv) try {
  int64_t epochs = 10, save_every = 2, batch = 32, crash_in = -1;
  std::string folder = "ddp_tutorial.snapshots";
  CLI::App app("A distributed training job that survives crashes");
  app.option_defaults()->always_capture_default();
  app.add_option("epochs", epochs)->check(CLI::Range(1, 100000));
  app.add_option("save_every", save_every, "epochs from snapshot to snapshot")->check(CLI::Range(1, 100000));
  app.add_option("--batch-size", batch, "pairs a step on each rank")->check(CLI::Range(1, 2048));
  app.add_option("--folder", folder, "of the snapshots");
  app.add_option("--crash-in", crash_in, "the epoch in which the last rank dies, unless it has begun from a snapshot");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const phalanx::ProcessContext context = phalanx::init_from_environment();
  if (kPairs % (batch * context.world_size) != 0) {
    throw phalanx::UsageError("2048 pairs make no whole batches: expected ranks x --batch-size to divide 2048, found " +
                              std::to_string(context.world_size) + " x " + std::to_string(batch));
  }

  torch::manual_seed(0);  // the same pairs and the same net on every rank
  const auto inputs = torch::rand({kPairs, kFeatures}).to(context.device);
  const auto targets = torch::rand({kPairs, 1}).to(context.device);
  torch::nn::Linear net(kFeatures, 1);
  net->to(context.device);
  phalanx::DistributedDataParallel ddp(*net, context.world);
  phalanx::Sgd optimizer(ddp.parameters());

  phalanx::TrainState state;  // handles to what a snapshot holds; SGD without momentum has no state
  state.tensors = ddp.parameters();
  state.integers["epochs_run"] = 0;
  phalanx::CheckpointManager snapshots(folder, {.keep_latest_k = 2}, context.world);
  if (snapshots.load_latest(state) && context.rank == 0) {
    std::printf("Resuming training from snapshot at Epoch %ld\n", static_cast<long>(state.integers["epochs_run"]));
  }

  const int64_t first = state.integers["epochs_run"], steps = kPairs / (batch * context.world_size);
  for (int64_t epoch = first; epoch < epochs; ++epoch) {
    std::printf("[GPU %d] Epoch %ld | Batchsize: %ld | Steps: %ld\n", context.rank, static_cast<long>(epoch),
                static_cast<long>(batch), static_cast<long>(steps));
    torch::manual_seed(static_cast<uint64_t>(epoch));  // the same order on every rank, another one in every epoch
    const auto order = torch::randperm(kPairs).view({steps, context.world_size, batch}).to(context.device);
    auto mean = torch::zeros({1}, context.device);
    for (int64_t step = 0; step < steps; ++step) {
      if (epoch == crash_in && first == 0 && step == steps / 2 && context.rank == context.world_size - 1) {
        std::raise(SIGKILL);
      }
      const auto mine = order[step][context.rank];
      const auto loss = torch::mse_loss(net->forward(inputs.index_select(0, mine)), targets.index_select(0, mine));
      loss.backward();
      optimizer.step(1e-3);
      optimizer.zero_grad();
      mean += loss.detach() / static_cast<double>(steps);
    }
    context.world->all_reduce(mean, {.op = phalanx::ReduceOp::avg});
    if (context.rank == 0) std::printf("Epoch %ld | loss %.9f\n", static_cast<long>(epoch), mean.item<double>());
    if ((epoch + 1) % save_every == 0) {
      state.integers["epochs_run"] = epoch + 1;
      const auto saved = snapshots.save(state, epoch + 1);
      if (context.rank == 0) {
        std::printf("Epoch %ld | Training snapshot saved at %s\n", static_cast<long>(epoch), saved.path.c_str());
      }
    }
    std::fflush(stdout);
  }
  return 0;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) std::fprintf(stderr, "ddp_tutorial: %s\n", error.what());
  return error.exit_status();
}
