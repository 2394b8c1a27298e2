// CIFAR-10 on several devices: one process with DataParallel, or one process per device with DistributedDataParallel.
//
//   cifar_data_parallel --data FOLDER --replicas 2                               one process, two replicas
//   phalanx launch --nproc-per-node 2 -- cifar_data_parallel --data FOLDER       two processes: faster
//
// FOLDER holds the binary version of CIFAR-10, plain or .gz; "synthetic" needs no files. Both forms use batches of 64
// over all devices. The batches are the same, and so are the losses up to rounding. Loss and accuracy are those of
// training.
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/models/image_batch.h"
#include "phalanx/models/image_nets.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/ddp/data_parallel.h"
#include "phalanx/parallel/ddp/ddp.h"

int main(int argc, char** argv) try {
  std::string data = "synthetic";
  int replicas = 2, epochs = 10;
  std::int64_t batch = 64, images = 0;
  double lr = 0.001;
  CLI::App app("A small CNN on CIFAR-10, data parallel");
  app.add_option("--data", data, "folder with CIFAR-10's binary files, or synthetic")->capture_default_str();
  app.add_option("--replicas", replicas, "of one process: on its GPUs in turn, or on the CPU")
      ->check(CLI::Range(1, 64));
  app.add_option("--epochs", epochs)->check(CLI::Range(1, 10000))->capture_default_str();
  app.add_option("--batch", batch, "images a step, over all devices")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--images", images, "the first of the training set; 0: all")->check(CLI::NonNegativeNumber);
  app.add_option("--lr", lr)->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const phalanx::ProcessContext context = phalanx::init_from_environment();

  phalanx::models::CifarNet net({.device = context.device});
  phalanx::nn::initialise(net, /*seed=*/1);
  std::unique_ptr<phalanx::DistributedDataParallel> ddp;
  std::unique_ptr<phalanx::DataParallel> parallel;
  if (context.world_size > 1) {
    ddp = std::make_unique<phalanx::DistributedDataParallel>(net, context.world);
  } else {
    const auto there = phalanx::DataParallel::all_devices();
    std::vector<at::Device> devices;
    for (int i = 0; i < replicas; ++i) devices.push_back(there[static_cast<std::size_t>(i) % there.size()]);
    parallel = std::make_unique<phalanx::DataParallel>(net, devices,
                                                       [] { return std::make_shared<phalanx::models::CifarNet>(); });
  }
  phalanx::Sgd optimizer(phalanx::nn::named_parameters(net), {.momentum = 0.9});
  const phalanx::models::ImageLoader loader(
      {.global_batch = batch, .rank = context.rank, .ranks = context.world_size, .seed = 1, .device = context.device},
      phalanx::data::load_images(data, phalanx::data::ImageKind::cifar10, phalanx::data::ImageSplit::train, images));

  const auto begin = std::chrono::steady_clock::now();
  for (int epoch = 0; epoch < epochs; ++epoch) {
    at::Tensor totals = at::zeros({3}, at::TensorOptions(at::kDouble).device(context.device));  // loss, right, rows
    for (std::int64_t step = 0; step < loader.steps_per_epoch(); ++step) {
      const auto [x, y, first_row] = loader.batch(epoch, step);
      const at::Tensor logits = parallel ? parallel->forward(x) : phalanx::nn::call(net, x);
      const at::Tensor loss = at::cross_entropy_loss(logits, y);
      loss.backward();
      optimizer.step(lr);
      optimizer.zero_grad();
      const auto rows = static_cast<double>(y.size(0));
      totals[0] += loss.detach() * rows;
      totals[1] += logits.detach().argmax(1).eq(y).sum();
      totals[2] += rows;
    }
    context.world->all_reduce(totals);
    totals = totals.cpu();
    const auto* sums = totals.const_data_ptr<double>();
    if (context.rank == 0) {
      fmt::print("Epoch [{}/{}], Loss: {:.4f}, Acc: {:.4f}\n", epoch + 1, epochs, sums[0] / sums[2], sums[1] / sums[2]);
      std::fflush(stdout);
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (context.rank == 0) fmt::print("Training time: {:.2f} seconds\n", seconds);
  return 0;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "cifar_data_parallel: {}\n", error.what());
  return error.exit_status();
}
