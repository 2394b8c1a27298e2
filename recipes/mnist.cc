// MNIST on one device: the small convolutional net of torch's own examples.
//
//   mnist --data FOLDER                 14 epochs on MNIST's IDX files, plain or .gz
//   mnist --data synthetic --epochs 1   a look-alike that needs no files; at least 97 % after this one epoch
//
// conv 1 -> 32, ReLU, conv 32 -> 64, ReLU, pool 2, dropout 0.25, fc 9216 -> 128, ReLU, dropout 0.5, fc 128 -> 10,
// log-softmax: 1,199,882 parameters (models::MnistNet). Adadelta with lr 1.0, times gamma = 0.7 after every epoch.
// mnist_sharded is the same on several devices, with the same batches and the same dropout.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/nll_loss.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/models/image_batch.h"
#include "phalanx/models/image_nets.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adadelta.h"

namespace phalanx {
namespace {

struct Options {
  std::string data = "synthetic";
  int epochs = 14;
  std::int64_t batch = 64, test_batch = 1000, images = 0, log_interval = 10;
  std::uint64_t seed = 1;
  double lr = 1.0, gamma = 0.7;
};

models::ImageLoader loader(const Options& options, at::Device device, data::ImageSplit split) {
  const bool train = split == data::ImageSplit::train;
  const std::int64_t count = train || options.images == 0 ? options.images : options.images / 6 + 1;
  return {{.global_batch = train ? options.batch : options.test_batch,
           .seed = options.seed,
           .shuffle = train,
           .drop_last = train,
           .mean = 0.1307,
           .deviation = 0.3081,
           .device = device},
          data::load_images(options.data, data::ImageKind::mnist, split, count)};
}

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

void test(models::MnistNet& net, const models::ImageLoader& images) {
  const at::NoGradGuard no_grad;
  net.eval();
  double loss = 0;
  std::int64_t right = 0;
  for (std::int64_t i = 0; i < images.steps_per_epoch(); ++i) {
    const models::ImageBatch batch = images.batch(0, i);
    const at::Tensor scores = nn::call(net, batch.images);
    loss += at::nll_loss(scores, batch.labels, {}, at::Reduction::Sum).item().toDouble();
    right += scores.argmax(1).eq(batch.labels).sum().item().toLong();
  }
  const auto count = static_cast<double>(images.set().size());
  fmt::print("Test set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\n", loss / count, right, images.set().size(),
             100 * static_cast<double>(right) / count);
  std::fflush(stdout);
}

int run(int argc, char** argv) try {
  Options options;
  CLI::App app("MNIST on one device");
  app.option_defaults()->always_capture_default();
  app.add_option("--data", options.data, "folder with MNIST's IDX files, or synthetic");
  app.add_option("--epochs", options.epochs)->check(CLI::Range(1, 10000));
  app.add_option("--batch", options.batch, "images a step")->check(CLI::PositiveNumber);
  app.add_option("--test-batch", options.test_batch)->check(CLI::PositiveNumber);
  app.add_option("--images", options.images,
                 "the first of the training set, and a sixth as many of the test set; 0: all")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--log-interval", options.log_interval, "steps from line to line")->check(CLI::PositiveNumber);
  app.add_option("--lr", options.lr)->check(CLI::PositiveNumber);
  app.add_option("--gamma", options.gamma, "lr is multiplied by it after every epoch")->check(CLI::PositiveNumber);
  app.add_option("--seed", options.seed);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const ProcessContext context = init_from_environment();  // its device: the GPU if there is one
  if (context.world_size > 1) throw UsageError("this is for one device; for several there is mnist_sharded");
  models::MnistNet net({.device = context.device});
  nn::initialise(net, options.seed);
  Adadelta optimizer(nn::named_parameters(net));
  const models::ImageLoader images = loader(options, context.device, data::ImageSplit::train);
  const models::ImageLoader tests = loader(options, context.device, data::ImageSplit::test);
  double lr = options.lr;
  for (int epoch = 1; epoch <= options.epochs; ++epoch, lr *= options.gamma) {
    train(net, optimizer, images, options, epoch, lr);
    test(net, tests);
  }
  return 0;
} catch (const Error& error) {
  if (!report_error_to_launcher(error)) fmt::print(stderr, "mnist: {}\n", error.what());
  return error.exit_status();
}

}  // namespace
}  // namespace phalanx

int main(int argc, char** argv) { return phalanx::run(argc, argv); }
