// Model parallelism and pipelining: the CNN of the other recipes divided over ranks, and a two-layer toy.
//
//   pipeline_cnn                                                              the whole net on one rank
//   phalanx launch --nproc-per-node 2 -- pipeline_cnn --chunks 1              naive: one rank works, the other waits
//   phalanx launch --nproc-per-node 2 -- pipeline_cnn --chunks 8              a batch of 64 in 8 micro-batches (GPipe)
//   phalanx launch --nproc-per-node 2 -- pipeline_cnn --net toy --chunks 8    Linear(16, 8) | Linear(8, 4)
//
// The CNN is cut after its first pool: activations go to the second rank, their gradients come back. The losses are
// those of one rank, whatever the chunks; --schedule 1F1B or ZB1P only changes which rank waits when.
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/models/image_batch.h"
#include "phalanx/models/image_nets.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/schedule/generators.h"

namespace {

using phalanx::PipelineStage;

// The stages [first, end) of two, or both as one. Modules are registered under their names in the whole net.
std::vector<PipelineStage> stages_of(const std::string& net, int stages, const std::vector<int>& mine) {
  struct Part : phalanx::nn::Module {};
  const auto part = std::make_shared<Part>();
  PipelineStage::Forward first, second;
  PipelineStage::Loss loss_of;
  const auto whole = std::make_shared<phalanx::models::CifarNet>();
  const bool has_first = mine.front() == 0, has_second = mine.back() == stages - 1;
  if (net == "toy") {
    const auto layer = [&](const char* name, std::int64_t in, std::int64_t out) {
      return part->register_module(name,
                                   std::make_shared<phalanx::nn::Linear>(phalanx::nn::LinearOptions{in, out, true}));
    };
    if (has_first) first = [l = layer("0", 16, 8)](const at::Tensor& x) { return phalanx::nn::call(l, x); };
    if (has_second) second = [l = layer("1", 8, 4)](const at::Tensor& x) { return phalanx::nn::call(l, x); };
    loss_of = [](const at::Tensor& y, const at::Tensor& target) { return at::mse_loss(y, target); };
  } else {
    if (has_first) part->register_module("conv1", whole->conv1);
    if (has_second) part->register_module("conv2", whole->conv2);
    if (has_second) part->register_module("fc1", whole->fc1);
    if (has_second) part->register_module("fc2", whole->fc2);
    first = [whole](const at::Tensor& x) { return at::max_pool2d(at::relu(phalanx::nn::call(whole->conv1, x)), 2); };
    second = [whole](const at::Tensor& x) {
      const at::Tensor y = at::max_pool2d(at::relu(phalanx::nn::call(whole->conv2, x)), 2).flatten(1);
      return phalanx::nn::call(whole->fc2, at::relu(phalanx::nn::call(whole->fc1, y)));
    };
    loss_of = [](const at::Tensor& y, const at::Tensor& target) { return at::cross_entropy_loss(y, target); };
  }
  phalanx::nn::initialise(*part, /*seed=*/1);
  PipelineStage stage{.index = mine.front(), .module = part};
  stage.forward = has_first ? first : second;
  if (has_first && has_second) stage.forward = [first, second](const at::Tensor& x) { return second(first(x)); };
  if (has_second) {
    stage.loss = [forward = stage.forward, loss_of](const at::Tensor& x, const at::Tensor& target) {
      return loss_of(forward(x), target);
    };
  }
  return {stage};
}

}  // namespace

int main(int argc, char** argv) try {
  std::string net = "cnn", data = "synthetic", name = "GPipe";
  int chunks = 8, steps = 20;
  CLI::App app("A net cut over ranks, its batches in chunks");
  app.add_option("--net", net)->check(CLI::IsMember({"cnn", "toy"}))->capture_default_str();
  app.add_option("--data", data, "folder with CIFAR-10's binary files, or synthetic")->capture_default_str();
  app.add_option("--schedule", name, "GPipe, 1F1B or ZB1P")->capture_default_str();
  app.add_option("--chunks", chunks, "micro-batches of a batch of 64")->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--steps", steps)->check(CLI::Range(1, 100000))->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const phalanx::ProcessContext context = phalanx::init_from_environment({.device = "cpu"});
  if (context.world_size > 2) throw phalanx::UsageError("the net has two parts: start 1 or 2 ranks");
  const auto schedule = phalanx::schedule::make_schedule(
      {.name = name, .ranks = context.world_size, .stages_per_rank = 1, .micro_batches = chunks});
  auto stages = stages_of(net, schedule.stages(), schedule.stages_of(context.rank));
  phalanx::PipelineRuntime pipeline(context.world, schedule, stages);
  phalanx::Sgd optimizer(phalanx::nn::named_parameters(*stages[0].module), {.momentum = 0.9});

  const phalanx::models::ImageLoader loader(
      {.global_batch = 64, .seed = 1},
      phalanx::data::load_images(data, phalanx::data::ImageKind::cifar10, phalanx::data::ImageSplit::train, 640));
  at::Tensor x = at::empty({64, 16}), y = at::empty({64, 4});
  phalanx::fill(x, phalanx::Init::normal(0.0, 1.0), 1, "x");
  phalanx::fill(y, phalanx::Init::normal(0.0, 1.0), 1, "y");
  const auto begin = std::chrono::steady_clock::now();
  for (int step = 0; step < steps; ++step) {
    if (net == "cnn") {
      const auto batch = loader.batch(step / loader.steps_per_epoch(), step % loader.steps_per_epoch());
      x = batch.images, y = batch.labels;
    }
    const double loss = pipeline.step(x, y).loss();
    optimizer.step(0.01);
    optimizer.zero_grad();
    if (context.rank == 0) fmt::print("step {}: loss {:.5f}\n", step + 1, loss);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (context.rank == 0) {
    fmt::print("{} rank(s), {} chunk(s), {}: {:.2f} ms a step\n", context.world_size, chunks, schedule.name,
               1e3 * seconds / steps);
  }
  return 0;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "pipeline_cnn: {}\n", error.what());
  return error.exit_status();
}
