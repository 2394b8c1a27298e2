// MNIST on all devices, sharded (FSDP), compared in memory and time with DistributedDataParallel.
//
//   phalanx launch --nproc-per-node 2 -- mnist_sharded --data FOLDER
//   phalanx launch --nproc-per-node 2 -- mnist_sharded --data synthetic --cpu-offload
//
// FOLDER holds MNIST's IDX files, plain or .gz. Layers are unsharded in units of at least --smallest-unit elements.
// Losses and counts are sums over all ranks. Batches and dropout are the same for any number of ranks, and so are the
// losses up to rounding. Adadelta with lr 1.0, times 0.7 after every epoch.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/image_batch.h"
#include "phalanx/models/image_nets.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adadelta.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/tensor/counting_allocator.h"

namespace phalanx {
namespace {

struct Options {
  std::string data = "synthetic";
  int epochs = 1;
  std::int64_t batch = 64, images = 0, smallest_unit = 20'000;
  bool offload = false;
};

models::ImageLoader loader(const Options& options, const ProcessContext& context, data::ImageSplit split) {
  const bool train = split == data::ImageSplit::train;
  const std::int64_t count = train || options.images == 0 ? options.images : options.images / 6 + 1;
  models::ImageLoaderOptions how{
      .rank = context.rank, .ranks = context.world_size, .seed = 1, .device = context.device};
  how.global_batch = train ? options.batch : 1000 / how.ranks * how.ranks;
  how.shuffle = how.drop_last = train;
  how.mean = 0.1307, how.deviation = 0.3081;
  return {how, data::load_images(options.data, data::ImageKind::mnist, split, count)};
}

/// Sums of loss, right answers and images over one epoch of this rank's rows.
template <class Step>
std::array<double, 3> epoch_of(const models::ImageLoader& images, const ProcessContext& context, std::int64_t epoch,
                               const Step& step) {
  at::Tensor totals = at::zeros({3}, at::TensorOptions(at::kDouble).device(context.device));
  for (std::int64_t i = 0; i < images.steps_per_epoch(); ++i) {
    const models::ImageBatch batch = images.batch(epoch, i);
    const at::Tensor scores = step(i, batch);
    totals[0] += at::nll_loss(scores, batch.labels, {}, at::Reduction::Sum);
    totals[1] += scores.argmax(1).eq(batch.labels).sum();
    totals[2] += batch.labels.size(0);
  }
  context.world->all_reduce(totals);
  totals = totals.cpu();
  const auto* sums = totals.const_data_ptr<double>();
  return {sums[0], sums[1], sums[2]};
}

/// Seconds, and the peak of this rank's host memory in a training step.
std::pair<double, std::string> train(const Options& options, const ProcessContext& context, bool shard) {
  const models::ImageLoader images = loader(options, context, data::ImageSplit::train);
  const models::ImageLoader tests = loader(options, context, data::ImageSplit::test);
  observe::reset_peak_memory_stats();
  models::MnistNet net({.device = context.device, .without_memory = shard});
  std::unique_ptr<DistributedDataParallel> ddp;
  std::unique_ptr<FullyShardedDataParallel> sharded;
  if (shard) {
    const DeviceMesh mesh(context.world, {{"dp_shard", context.world_size}});
    sharded = std::make_unique<FullyShardedDataParallel>(
        net, mesh, FullyShardOptions{.offload = options.offload, .smallest_unit = options.smallest_unit});
    sharded->initialise(/*seed=*/1);
  } else {
    nn::initialise(net, /*seed=*/1);
    ddp = std::make_unique<DistributedDataParallel>(net, context.world);
  }
  if (context.rank == 0) fmt::print("{}\n", shard ? fmt::format("sharded, units {}", sharded->units()) : "replicated");
  Adadelta optimizer(shard ? sharded->parameters() : ddp->parameters());
  const auto begin = std::chrono::steady_clock::now();
  double lr = 1.0;
  std::string peak;
  for (int epoch = 1; epoch <= options.epochs; ++epoch, lr *= 0.7) {
    net.train();
    const auto [loss, right, count] = epoch_of(images, context, epoch, [&](std::int64_t i, const auto& batch) {
      const std::int64_t step = (epoch - 1) * images.steps_per_epoch() + i;
      nn::set_dropout_rng_state(net, {.seed = 1, .step = step, .first_row = batch.first_row});
      const at::Tensor scores = nn::call(net, batch.images);
      at::nll_loss(scores, batch.labels).backward();
      optimizer.step(lr);
      optimizer.zero_grad();
      return scores.detach();
    });
    if (epoch == 1) peak = observe::max_memory_allocated().text();
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
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), peak};
}

int run(int argc, char** argv) try {
  Options options;
  CLI::App app("MNIST, sharded over all ranks and beside it replicated on them");
  app.add_option("--data", options.data, "folder with MNIST's IDX files, or synthetic")->capture_default_str();
  app.add_option("--epochs", options.epochs)->check(CLI::Range(1, 10000))->capture_default_str();
  app.add_option("--batch", options.batch, "images a step, over all ranks")->check(CLI::PositiveNumber);
  app.add_option("--images", options.images, "the first of the training set; 0: all")->check(CLI::NonNegativeNumber);
  app.add_option("--smallest-unit", options.smallest_unit, "elements")->check(CLI::NonNegativeNumber);
  app.add_flag("--cpu-offload", options.offload, "keep shards, gradients and optimizer state on the host");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  install_counting_allocator();
  const ProcessContext context = init_from_environment();
  const auto sharded = train(options, context, true), replicated = train(options, context, false);
  if (context.rank == 0) {
    fmt::print("sharded    {:>8.2f} s  peak in training, rank 0's host memory: {}\n", sharded.first, sharded.second);
    fmt::print("replicated {:>8.2f} s  peak in training, rank 0's host memory: {}\n", replicated.first,
               replicated.second);
  }
  return 0;
} catch (const Error& error) {
  if (!report_error_to_launcher(error)) fmt::print(stderr, "mnist_sharded: {}\n", error.what());
  return error.exit_status();
}

}  // namespace
}  // namespace phalanx

int main(int argc, char** argv) { return phalanx::run(argc, argv); }
