// MNIST on all devices, sharded (FSDP), and beside it replicated (DistributedDataParallel): what each rank keeps, how
// much memory it needs at its peak, and the time.
//
// Losses and counts are sums over all ranks. Batches and dropout are the same for any number of ranks, and so are the
// losses up to rounding. Adadelta with --lr 1.0, times 0.7 after every epoch. Each layer is a unit, which is unsharded
// when it is used; --smallest-unit 20000 joins neighbours until each unit has as many elements: here these four.
//
//   $ phalanx launch --nproc-per-node 2 -- mnist_sharded --images 3200
//   sharded, 4 unit(s):
//   conv1 | conv2 | fc1 | fc2
//   rank 0: parameters 2.29 MiB, gradients 2.29 MiB, optimizer state 4.58 MiB; peak 44.2 MiB
//   rank 1: parameters 2.29 MiB, gradients 2.29 MiB, optimizer state 4.58 MiB; peak 44.2 MiB
//   Train Epoch: 1 [3200/3200 (100%)]  Loss: 1.226447
//   Test set: Average loss: 0.0184, Accuracy: 533/534 (100%)
//   sharded: 7.91 s
//   replicated
//   rank 0: parameters 4.58 MiB, gradients 4.58 MiB, optimizer state 9.15 MiB; peak 35.4 MiB
//   rank 1: parameters 4.58 MiB, gradients 4.58 MiB, optimizer state 9.15 MiB; peak 35.4 MiB
//   Train Epoch: 1 [3200/3200 (100%)]  Loss: 1.226447
//   Test set: Average loss: 0.0184, Accuracy: 533/534 (100%)
//   replicated: 6.91 s
//
// Each rank keeps half of everything, but the peak does not fall: fc1 has 98 % of the parameters, and while it is used,
// it and its gradient are whole on each rank, beside what the rank keeps. In a deep net the largest unit is a small
// part of it, and the peak falls, too ("...": losses, as above; recipes/expected/mnist_sharded.txt has all lines):
//
//   $ phalanx launch --nproc-per-node 2 -- mnist_sharded --images 1280 --deep 8 --lr 0.3
//   sharded, 13 unit(s):
//   conv1 | conv2 | fc1 | widen | block0 | block1 | block2 | block3 | block4 | block5 | block6 | block7 | fc2
//   rank 0: parameters 18.6 MiB, gradients 18.6 MiB, optimizer state 37.2 MiB; peak 109 MiB
//   rank 1: parameters 18.6 MiB, gradients 18.6 MiB, optimizer state 37.1 MiB; peak 109 MiB
//   ...
//   replicated
//   rank 0: parameters 37.1 MiB, gradients 37.1 MiB, optimizer state 74.3 MiB; peak 186 MiB
//   rank 1: parameters 37.1 MiB, gradients 37.1 MiB, optimizer state 74.3 MiB; peak 186 MiB
//   ...
//
// --data FOLDER: MNIST IDX files, plain or .gz. --cpu-offload keeps shards, gradients and optimizer state on the host.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/nll_loss.h>
#include <fmt/format.h>

#include <chrono>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adadelta.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/tensor/counting_allocator.h"
#include "recipes/deep_mnist.h"
#include "recipes/kept_memory.h"
#include "recipes/mnist_epoch.h"
#include "recipes/recipe.h"

namespace phalanx {
namespace {

struct Options : MnistBatches {
  int epochs = 1, deep = 0;
  double first_lr = 1.0;
  std::int64_t smallest_unit = 0;
  bool offload = false;
};

/// Trains and tests; prints what each rank keeps after the first backward pass, and its peak in the first epoch.
void train_and_test(DeepMnistNet& net, Optimizer& optimizer, const Options& options, const ProcessContext& context) {
  const auto images = mnist_loader(options, context, data::ImageSplit::train);
  const auto tests = mnist_loader(options, context, data::ImageSplit::test);
  std::string kept;
  double lr = options.first_lr;
  for (int epoch = 1; epoch <= options.epochs; ++epoch, lr *= 0.7) {
    net.train();
    const auto [loss, right, count] = epoch_of(images, context, epoch, [&](std::int64_t i, const auto& batch) {
      const std::int64_t step = (epoch - 1) * images.steps_per_epoch() + i;
      nn::set_dropout_rng_state(net, {.seed = 1, .step = step, .first_row = batch.first_row});
      const at::Tensor scores = nn::call(net, batch.images);
      // Of the whole batch's mean: the ranks' parts of the last batch may differ, and gradients are averaged.
      const double weight = context.world_size / static_cast<double>(images.rows(i));
      (at::nll_loss(scores, batch.labels, {}, at::Reduction::Sum) * weight).backward();
      if (kept.empty()) kept = recipe::kept_memory(optimizer);
      optimizer.step(lr);
      optimizer.zero_grad();
      return scores.detach();
    });
    if (epoch == 1) {
      recipe::print_by_rank(*context.world, fmt::format("{}; peak {}", kept, recipe::peak_memory(context.device)));
    }
    net.eval();
    const at::NoGradGuard no_grad;
    const auto [test_loss, test_right, tested] =
        epoch_of(tests, context, 0, [&](std::int64_t, const auto& batch) { return nn::call(net, batch.images); });
    if (context.rank != 0) continue;
    const auto all = static_cast<double>(images.set().size());
    fmt::print("Train Epoch: {} [{:.0f}/{:.0f} ({:.0f}%)]  Loss: {:.6f}\n", epoch, count, all, 100 * count / all,
               loss / count);
    fmt::print("Test set: Average loss: {:.4f}, Accuracy: {:.0f}/{:.0f} ({:.0f}%)\n", test_loss / tested, test_right,
               tested, 100 * test_right / tested);
  }
}

void train_sharded(const Options& options, const ProcessContext& context) {
  DeepMnistNet net(options.deep, {.device = context.device, .without_memory = true});
  const DeviceMesh mesh(context.world, {{"dp_shard", context.world_size}});
  FullyShardedDataParallel sharded(net, mesh, {.offload = options.offload, .smallest_unit = options.smallest_unit});
  sharded.initialise(/*seed=*/1);
  const auto units = sharded.units();
  if (context.rank == 0) fmt::print("sharded, {} unit(s):\n{}\n", units.size(), recipe::modules_of(units));
  Adadelta optimizer(sharded.parameters());
  train_and_test(net, optimizer, options, context);
}

void train_replicated(const Options& options, const ProcessContext& context) {
  DeepMnistNet net(options.deep, {.device = context.device});
  nn::initialise(net, /*seed=*/1);
  const DistributedDataParallel ddp(net, context.world);
  if (context.rank == 0) fmt::print("replicated\n");
  Adadelta optimizer(ddp.parameters());
  train_and_test(net, optimizer, options, context);
}

bool compare(const Options& options, const ProcessContext& context) {
  for (const auto& [name, train] : {std::pair("sharded", &train_sharded), std::pair("replicated", &train_replicated)}) {
    recipe::reset_peak_memory(context.device);
    const auto begin = std::chrono::steady_clock::now();
    train(options, context);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (context.rank == 0) fmt::print("{}: {:.2f} s\n", name, took.count());
  }
  return true;
}

}  // namespace
}  // namespace phalanx

int main(int argc, char** argv) {
  phalanx::Options options;
  recipe::Program program;
  program.add_option("--data", options.data, "folder with MNIST's IDX files, or synthetic");
  program.add_option("--epochs", options.epochs)->check(CLI::Range(1, 10000));
  program.add_option("--batch", options.batch, "images a step, over all ranks")->check(recipe::at_least(1));
  program.add_option("--images", options.images, "the first of the training set; 0: all")->check(recipe::at_least(0));
  program.add_option("--lr", options.first_lr, "of the first epoch")->check(recipe::positive());
  program.add_option("--deep", options.deep, "blocks between the fully connected layers")->check(CLI::Range(0, 1000));
  program.add_option("--smallest-unit", options.smallest_unit, "elements")->check(recipe::at_least(0));
  program.add_flag("--cpu-offload", options.offload, "keep shards, gradients and optimizer state on the host");
  phalanx::install_counting_allocator();
  return program.run(argc, argv, [&](const auto& context) { return compare(options, context); });
}
