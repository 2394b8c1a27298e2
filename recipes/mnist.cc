// MNIST on one device: the small convolutional net of torch's own examples.
//
// conv 1 -> 32, ReLU, conv 32 -> 64, ReLU, pool 2, dropout 0.25, fc 9216 -> 128, ReLU, dropout 0.5, fc 128 -> 10,
// log-softmax: 1,199,882 parameters (models::MnistNet). Adadelta with lr 1.0, times gamma = 0.7 after every epoch.
// mnist_sharded is the same on several devices, with the same batches and the same dropout.
//
//   mnist --data FOLDER        14 epochs on MNIST's IDX files, plain or .gz
//
// The synthetic look-alike needs no files. One epoch of 3,200 images teaches the net at least 97 % of 534 others.
// In < > stand losses in which rounding becomes visible, which differs between processors.
//
//   $ mnist --images 3200 --epochs 1
//   Train Epoch: 1 [0/3200 (0%)]  Loss: 2.308283
//   Train Epoch: 1 [640/3200 (20%)]  Loss: 2.144800
//   Train Epoch: 1 [1280/3200 (40%)]  Loss: <1.39>
//   Train Epoch: 1 [1920/3200 (60%)]  Loss: <0.88>
//   Train Epoch: 1 [2560/3200 (80%)]  Loss: <0.25>
//   Test set: Average loss: <0.0193>, Accuracy: 533/534 (100%)
#include <ATen/core/grad_mode.h>
#include <ATen/ops/nll_loss.h>
#include <fmt/format.h>

#include <cstdio>

#include "phalanx/models/image_nets.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adadelta.h"
#include "recipes/mnist_epoch.h"
#include "recipes/recipe.h"

namespace phalanx {
namespace {

struct Options : MnistBatches {
  int epochs = 14;
  std::int64_t log_interval = 10;
  double lr = 1.0, gamma = 0.7;
};

void train(models::MnistNet& net, Adadelta& optimizer, const models::ImageLoader& images, const Options& options,
           std::int64_t epoch, double lr) {
  net.train();
  for (std::int64_t i = 0; i < images.steps_per_epoch(); ++i) {
    const auto [x, labels, first_row] = images.batch(epoch, i);
    const std::int64_t step = (epoch - 1) * images.steps_per_epoch() + i;
    nn::set_dropout_rng_state(net, {.seed = options.seed, .step = step, .first_row = first_row});
    const at::Tensor loss = at::nll_loss(nn::call(net, x), labels);
    loss.backward();
    optimizer.step(lr);
    optimizer.zero_grad();
    if (i % options.log_interval != 0) continue;
    const std::int64_t seen = i * options.batch, all = images.set().size();
    fmt::print("Train Epoch: {} [{}/{} ({:.0f}%)]  Loss: {:.6f}\n", epoch, seen, all,
               100.0 * static_cast<double>(i) / static_cast<double>(images.steps_per_epoch()), loss.item().toDouble());
    std::fflush(stdout);
  }
}

void test(models::MnistNet& net, const models::ImageLoader& images, const ProcessContext& context) {
  const at::NoGradGuard no_grad;
  net.eval();
  const auto [loss, right, count] = epoch_of(
      images, context, 0, [&](std::int64_t, const models::ImageBatch& batch) { return nn::call(net, batch.images); });
  fmt::print("Test set: Average loss: {:.4f}, Accuracy: {:.0f}/{:.0f} ({:.0f}%)\n", loss / count, right, count,
             100 * right / count);
  std::fflush(stdout);
}

bool train_and_test(const Options& options, const ProcessContext& context) {
  if (context.world_size > 1) throw UsageError("this is for one device; for several there is mnist_sharded");
  models::MnistNet net({.device = context.device});
  nn::initialise(net, options.seed);
  Adadelta optimizer(nn::named_parameters(net));
  const auto images = mnist_loader(options, context, data::ImageSplit::train);
  const auto tests = mnist_loader(options, context, data::ImageSplit::test);
  double lr = options.lr;
  for (int epoch = 1; epoch <= options.epochs; ++epoch, lr *= options.gamma) {
    train(net, optimizer, images, options, epoch, lr);
    test(net, tests, context);
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
  program.add_option("--batch", options.batch, "images a step")->check(recipe::at_least(1));
  program.add_option("--test-batch", options.test_batch)->check(recipe::at_least(1));
  program
      .add_option("--images", options.images,
                  "the first of the training set, and a sixth as many of the test set; 0: all")
      ->check(recipe::at_least(0));
  program.add_option("--log-interval", options.log_interval, "steps from line to line")->check(recipe::at_least(1));
  program.add_option("--lr", options.lr)->check(recipe::positive());
  program.add_option("--gamma", options.gamma, "lr is multiplied by it after every epoch")->check(recipe::positive());
  program.add_option("--seed", options.seed);
  return program.run(argc, argv, [&](const auto& context) { return train_and_test(options, context); });
}
