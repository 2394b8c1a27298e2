// CIFAR-10 on several devices: one process with DataParallel, or one process per device with DistributedDataParallel.
//
//   $ cifar_data_parallel --replicas 2 --images 640 --epochs 4 --lr 0.03             # one process, two replicas
//   Epoch [1/4], Loss: 2.2947, Acc: 0.1297
//   Epoch [2/4], Loss: 2.1967, Acc: 0.4156
//   Epoch [3/4], Loss: 1.4321, Acc: 0.8047
//   Epoch [4/4], Loss: 0.0487, Acc: 0.9969
//   Training time: 2.12 seconds
//   $ phalanx launch -n 2 -- cifar_data_parallel --images 640 --epochs 4 --lr 0.03   # two processes: faster
//   Epoch [1/4], Loss: 2.2947, Acc: 0.1297
//   Epoch [2/4], Loss: 2.1967, Acc: 0.4156
//   Epoch [3/4], Loss: 1.4321, Acc: 0.8047
//   Epoch [4/4], Loss: 0.0487, Acc: 0.9969
//   Training time: 1.36 seconds
//
// Both forms use batches of 64 over all devices. The batches are the same, and so are the losses up to rounding. Loss
// and accuracy are those of training. On GPUs --per-rank prints the most memory that each has needed: under
// DataParallel the first needs more than the others. --data FOLDER names a folder with the binary version of CIFAR-10,
// plain or .gz; without it, synthetic images need no files.
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>

#include "phalanx/models/image_batch.h"
#include "phalanx/models/image_nets.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/ddp/data_parallel.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "recipes/kept_memory.h"
#include "recipes/recipe.h"

namespace {

using phalanx::models::CifarNet;

struct Options {
  std::string data = "synthetic";
  int replicas = 2, epochs = 10;
  std::int64_t batch = 64, images = 0;
  double lr = 0.001;
};

/// Of one process: its GPUs in turn, or the CPU so many times.
std::vector<at::Device> devices_of_replicas(at::Device first, int replicas) {
  if (first.is_cpu()) return std::vector<at::Device>(static_cast<std::size_t>(replicas), first);
  const int count = c10::impl::VirtualGuardImpl(first.type()).deviceCount();
  std::vector<at::Device> devices;
  for (int i = 0; i < replicas; ++i) devices.emplace_back(first.type(), static_cast<at::DeviceIndex>(i % count));
  return devices;
}

std::string peaks_of(const std::vector<at::Device>& devices) {
  std::string text;
  for (const at::Device device : devices) {
    text += fmt::format("peak memory of {}: {}\n", device.str(), recipe::peak_memory(device));
  }
  return text;
}

using Forward = std::function<at::Tensor(const at::Tensor& images)>;

/// Sums of loss, right answers and images over one epoch of all ranks' rows.
std::array<double, 3> train_epoch(const Forward& forward, phalanx::Sgd& optimizer, double lr, int epoch,
                                  const phalanx::models::ImageLoader& loader, const phalanx::ProcessContext& context) {
  at::Tensor totals = at::zeros({3}, at::TensorOptions(at::kDouble).device(context.device));
  for (std::int64_t step = 0; step < loader.steps_per_epoch(); ++step) {
    const auto [x, y, first_row] = loader.batch(epoch, step);
    const at::Tensor logits = forward(x);
    const at::Tensor loss = at::cross_entropy_loss(logits, y, {}, at::Reduction::Sum);
    // Of the whole batch's mean: the ranks' parts of the last batch may differ, and DDP averages their gradients.
    (loss * (context.world_size / static_cast<double>(loader.rows(step)))).backward();
    optimizer.step(lr);
    optimizer.zero_grad();
    totals[0] += loss.detach();
    totals[1] += logits.detach().argmax(1).eq(y).sum();
    totals[2] += y.size(0);
  }
  context.world->all_reduce(totals);
  return {totals[0].item<double>(), totals[1].item<double>(), totals[2].item<double>()};
}

bool train(const Options& options, const phalanx::ProcessContext& context, bool per_rank) {
  CifarNet net({.device = context.device});
  phalanx::nn::initialise(net, /*seed=*/1);
  std::unique_ptr<phalanx::DistributedDataParallel> ddp;
  std::unique_ptr<phalanx::DataParallel> parallel;
  std::vector<at::Device> devices = {context.device};
  if (context.world_size > 1) {
    ddp = std::make_unique<phalanx::DistributedDataParallel>(net, context.world);
  } else {
    devices = devices_of_replicas(context.device, options.replicas);
    parallel = std::make_unique<phalanx::DataParallel>(net, devices, [&] {
      return std::make_shared<CifarNet>(phalanx::nn::TensorOptionsOfModule{.device = context.device});
    });
  }
  const Forward forward = [&](const at::Tensor& x) {
    return parallel ? parallel->forward(x) : phalanx::nn::call(net, x);
  };
  phalanx::Sgd optimizer(phalanx::nn::named_parameters(net), {.momentum = 0.9});
  const phalanx::models::ImageLoader loader(
      {.global_batch = options.batch,
       .rank = context.rank,
       .ranks = context.world_size,
       .seed = 1,
       .drop_last = false,
       .device = context.device},
      phalanx::data::load_images(options.data, phalanx::data::ImageKind::cifar10, phalanx::data::ImageSplit::train,
                                 options.images));
  const auto begin = std::chrono::steady_clock::now();
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    const auto [loss, right, count] = train_epoch(forward, optimizer, options.lr, epoch, loader, context);
    if (context.rank != 0) continue;
    fmt::print("Epoch [{}/{}], Loss: {:.4f}, Acc: {:.4f}\n", epoch + 1, options.epochs, loss / count, right / count);
    std::fflush(stdout);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (per_rank && !context.device.is_cpu()) recipe::print_by_rank(*context.world, peaks_of(devices));
  if (context.rank == 0) fmt::print("Training time: {:.2f} seconds\n", took.count());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  recipe::Program program;
  const bool& per_rank = program.add_per_rank_flag();
  program.add_option("--data", options.data, "folder with CIFAR-10's binary files, or synthetic");
  program.add_option("--replicas", options.replicas, "of one process: on its GPUs in turn, or on the CPU")
      ->check(CLI::Range(1, 64));
  program.add_option("--epochs", options.epochs)->check(CLI::Range(1, 10000));
  program.add_option("--batch", options.batch, "images a step, over all devices")->check(recipe::at_least(1));
  program.add_option("--images", options.images, "the first of the training set; 0: all")->check(recipe::at_least(0));
  program.add_option("--lr", options.lr)->check(recipe::positive());
  return program.run(argc, argv, [&](const auto& context) { return train(options, context, per_rank); });
}
