// The job of torch's DDP tutorial: a linear layer on random pairs, a snapshot every few epochs, and a restart from the
// last snapshot.
//
//   phalanx launch -n 2 --max-restarts 3 -- ddp_tutorial 10 2               10 epochs, a snapshot after every second
//
// Here the last rank dies in epoch 3, once. A run that crashed ends with the same bits as a run that did not.
//
//   $ phalanx launch -n 2 --max-restarts 3 -- ddp_tutorial 6 2 --crash-in 3
//   [GPU 0] Epoch 0 | Batchsize: 32 | Steps: 32
//   [GPU 1] Epoch 0 | Batchsize: 32 | Steps: 32
//   Epoch 0 | loss 0.451193690
//   [GPU 0] Epoch 1 | Batchsize: 32 | Steps: 32
//   [GPU 1] Epoch 1 | Batchsize: 32 | Steps: 32
//   Epoch 1 | loss 0.264512986
//   Epoch 1 | Training snapshot saved at ddp_tutorial.snapshots/step-2
//   [GPU 0] Epoch 2 | Batchsize: 32 | Steps: 32
//   [GPU 1] Epoch 2 | Batchsize: 32 | Steps: 32
//   Epoch 2 | loss 0.179274917
//   [GPU 0] Epoch 3 | Batchsize: 32 | Steps: 32
//   [GPU 1] Epoch 3 | Batchsize: 32 | Steps: 32
//   Resuming training from snapshot at Epoch 2
//   [GPU 0] Epoch 2 | Batchsize: 32 | Steps: 32
//   [GPU 1] Epoch 2 | Batchsize: 32 | Steps: 32
//   Epoch 2 | loss 0.179274917
//   [GPU 0] Epoch 3 | Batchsize: 32 | Steps: 32
//   [GPU 1] Epoch 3 | Batchsize: 32 | Steps: 32
//   Epoch 3 | loss 0.140273392
//   Epoch 3 | Training snapshot saved at ddp_tutorial.snapshots/step-4
//   [GPU 0] Epoch 4 | Batchsize: 32 | Steps: 32
//   [GPU 1] Epoch 4 | Batchsize: 32 | Steps: 32
//   Epoch 4 | loss 0.122407168
//   [GPU 0] Epoch 5 | Batchsize: 32 | Steps: 32
//   [GPU 1] Epoch 5 | Batchsize: 32 | Steps: 32
//   Epoch 5 | loss 0.114101604
//   Epoch 5 | Training snapshot saved at ddp_tutorial.snapshots/step-6
//
// The tutorial uses the cross entropy of one class, which is zero whatever the net does; this program uses the squared
// error.
#include <fmt/format.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdio>
#include <string>

#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "recipes/recipe.h"

namespace {

constexpr int64_t kPairs = 2048, kFeatures = 20;

struct Options {
  int64_t epochs = 10, save_every = 2, batch = 32, crash_in = -1;
  std::string folder = "ddp_tutorial.snapshots";
};

/// The steps of an epoch. Throws UsageError if pairs would be left over.
int64_t steps_of(const Options& options, int ranks) {
  if (kPairs % (options.batch * ranks) == 0) return kPairs / (options.batch * ranks);
  throw phalanx::UsageError(
      fmt::format("2048 pairs make no whole batches: expected ranks x --batch-size to divide 2048, found {} x {}",
                  ranks, options.batch));
}

struct Job {
  const phalanx::ProcessContext& context;
  const Options& options;
  int64_t steps = steps_of(options, context.world_size);
  at::Tensor inputs, targets;
  torch::nn::Linear net{nullptr};

  Job(const phalanx::ProcessContext& its_context, const Options& its_options)
      : context(its_context), options(its_options) {
    torch::manual_seed(0);  // the same pairs and the same net on every rank
    inputs = torch::rand({kPairs, kFeatures}).to(context.device);
    targets = torch::rand({kPairs, 1}).to(context.device);
    net = torch::nn::Linear(kFeatures, 1);
    net->to(context.device);
  }

  /// Returns the mean loss of the epoch over all ranks.
  double train_epoch(int64_t epoch, phalanx::Sgd& optimizer, bool crashes) {
    torch::manual_seed(static_cast<uint64_t>(epoch));  // the same order on every rank, another one in every epoch
    const auto order = torch::randperm(kPairs).view({steps, context.world_size, options.batch}).to(context.device);
    auto mean = torch::zeros({1}, context.device);
    for (int64_t step = 0; step < steps; ++step) {
      if (crashes && step == steps / 2 && context.rank == context.world_size - 1) std::raise(SIGKILL);
      const auto mine = order[step][context.rank];
      const auto loss = torch::mse_loss(net->forward(inputs.index_select(0, mine)), targets.index_select(0, mine));
      loss.backward();
      optimizer.step(1e-3);
      optimizer.zero_grad();
      mean += loss.detach() / static_cast<double>(steps);
    }
    context.world->all_reduce(mean, {.op = phalanx::ReduceOp::avg});
    return mean.item<double>();
  }

  bool run() {
    phalanx::DistributedDataParallel ddp(*net, context.world);
    phalanx::Sgd optimizer(ddp.parameters());
    phalanx::TrainState state;  // handles to what a snapshot holds; SGD without momentum has no state
    state.tensors = ddp.parameters();
    state.integers["epochs_run"] = 0;
    phalanx::CheckpointManager snapshots(options.folder, {.keep_latest_k = 2}, context.world);
    const bool resumes = snapshots.load_latest(state).has_value();
    const int64_t first = state.integers["epochs_run"];
    if (resumes && context.rank == 0) fmt::print("Resuming training from snapshot at Epoch {}\n", first);
    for (int64_t epoch = first; epoch < options.epochs; ++epoch) {
      for (const auto& line : context.world->gather_bytes(fmt::format("[GPU {}] Epoch {} | Batchsize: {} | Steps: {}",
                                                                      context.rank, epoch, options.batch, steps))) {
        fmt::print("{}\n", line);
      }
      std::fflush(stdout);  // before a crash
      const double loss = train_epoch(epoch, optimizer, epoch == options.crash_in && first == 0);
      if (context.rank == 0) fmt::print("Epoch {} | loss {:.9f}\n", epoch, loss);
      if ((epoch + 1) % options.save_every == 0) {
        state.integers["epochs_run"] = epoch + 1;
        const auto saved = snapshots.save(state, epoch + 1);
        if (context.rank == 0) fmt::print("Epoch {} | Training snapshot saved at {}\n", epoch, saved.path.string());
      }
      std::fflush(stdout);
    }
    return true;
  }
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  recipe::Program program;
  program.add_option("epochs", options.epochs)->check(CLI::Range(1, 100000));
  program.add_option("save_every", options.save_every, "epochs from snapshot to snapshot")
      ->check(CLI::Range(1, 100000));
  program.add_option("--batch-size", options.batch, "pairs a step on each rank")->check(CLI::Range(1, 2048));
  program.add_option("--folder", options.folder, "of the snapshots");
  program.add_option("--crash-in", options.crash_in,
                     "the epoch in which the last rank dies, unless it has begun from a snapshot");
  return program.run(argc, argv, [&](const auto& context) { return Job(context, options).run(); });
}
