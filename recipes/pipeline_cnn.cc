// Model parallelism and pipelining: a whole Sequential cut over ranks with one call.
//
// The CNN of the other recipes is cut after its first pool: activations go to the second rank, their gradients come
// back. In one chunk this is naive model parallelism, where one rank works and the other waits. In 8 chunks of a batch
// of 64 it is a pipeline (GPipe). The losses are those of one rank, whatever the chunks; --schedule 1F1B or ZB1P only
// changes which rank waits when. --per-rank shows the passes of each stage in the last step. --data FOLDER takes all
// images of CIFAR-10, --images N the first N, and without either it is the first 640 synthetic ones.
//
//   $ pipeline_cnn --steps 3                                                  # the whole net on one rank
//   step 1: loss 2.29508
//   step 2: loss 2.29440
//   step 3: loss 2.31606
//   1 rank(s), 8 chunk(s), GPipe: 79.74 ms a step
//   $ phalanx launch -n 2 -- pipeline_cnn --steps 3 --chunks 1                # naive
//   step 1: loss 2.29508
//   step 2: loss 2.29440
//   step 3: loss 2.31606
//   2 rank(s), 1 chunk(s), GPipe: 83.78 ms a step
//   $ phalanx launch -n 2 -- pipeline_cnn --steps 3 --chunks 8 --per-rank     # a pipeline
//   step 1: loss 2.29508
//   step 2: loss 2.29440
//   step 3: loss 2.31606
//   rank 0: passes 0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7
//   rank 1: passes 1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7 1B0 1B1 1B2 1B3 1B4 1B5 1B6 1B7
//   2 rank(s), 8 chunk(s), GPipe: 72.60 ms a step
//   $ phalanx launch -n 2 -- pipeline_cnn --steps 3 --net toy --chunks 8      # Linear(16, 8) | Linear(8, 4)
//   step 1: loss 1.12088
//   step 2: loss 1.12077
//   step 3: loss 1.12057
//   2 rank(s), 8 chunk(s), GPipe: 26.45 ms a step
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <memory>

#include "phalanx/models/image_batch.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/pipeline/sequential_pipeline.h"
#include "phalanx/schedule/schedule_text.h"
#include "recipes/recipe.h"
#include "recipes/sequential_nets.h"

namespace {

constexpr std::int64_t kBatch = 64;

struct Options {
  std::string net = "cnn", data = "synthetic", schedule = "GPipe";
  int chunks = 8, steps = 20;
  std::int64_t images = 0;
};

using Batches = std::function<FullBatch(int step)>;

Batches batches_of(const Options& options, at::Device device, bool is_talking) {
  if (options.net == "toy") {
    const at::Tensor x = at::empty({kBatch, 16}), y = at::empty({kBatch, 4});
    phalanx::fill(x, phalanx::Init::normal(0.0, 1.0), 1, "x");
    phalanx::fill(y, phalanx::Init::normal(0.0, 1.0), 1, "y");
    return [x = x.to(device), y = y.to(device)](int) { return FullBatch{x, y, kBatch}; };
  }
  const std::int64_t images = options.images == 0 && options.data == "synthetic" ? 10 * kBatch : options.images;
  const auto loader = std::make_shared<phalanx::models::ImageLoader>(
      phalanx::models::ImageLoaderOptions{.global_batch = kBatch, .seed = 1, .drop_last = false, .device = device},
      phalanx::data::load_images(options.data, phalanx::data::ImageKind::cifar10, phalanx::data::ImageSplit::train,
                                 images));
  const std::int64_t last = loader->rows(loader->steps_per_epoch() - 1);
  if (last < kBatch && is_talking) fmt::print("the last batch of an epoch has {} of {} images\n", last, kBatch);
  return [loader](int step) {
    const auto batch = loader->batch(step / loader->steps_per_epoch(), step % loader->steps_per_epoch());
    return filled_up(batch.images, batch.labels, kBatch);
  };
}

void print_passes(phalanx::PipelineRuntime& pipeline, phalanx::Communicator& world) {
  std::string text = "passes";
  for (const auto& pass : pipeline.statistics().passes) text += " " + phalanx::schedule::to_text(pass.action);
  recipe::print_by_rank(world, text);
}

bool train(const phalanx::ProcessContext& context, const Options& options, bool per_rank) {
  const int ranks = context.world_size;
  if (ranks > 2) throw phalanx::UsageError("the net has two parts: start 1 or 2 ranks");
  if (kBatch % options.chunks != 0) {
    throw phalanx::UsageError(
        fmt::format("--chunks {}: expected a divisor of the batch of {}", options.chunks, kBatch));
  }
  const bool is_cnn = options.net == "cnn";
  const SequentialNet net = is_cnn ? sequential_cnn(context.device) : sequential_toy(context.device);
  phalanx::SequentialPipeline pipeline(  // the one call
      net.layers, net.loss, context.world,
      {.chunks = options.chunks,
       .schedule = options.schedule,
       .stages_per_rank = 1,
       .children = ranks == 2 ? net.parts : std::vector<int>(),
       .runtime = {.loss = phalanx::PipelineLoss::sum}});
  phalanx::Sgd optimizer(pipeline.parameters(), {.momentum = 0.9});
  const Batches batches = batches_of(options, context.device, context.rank == 0);
  const auto begin = std::chrono::steady_clock::now();
  for (int step = 0; step < options.steps; ++step) {
    const auto [x, y, rows] = batches(step);
    *net.rows = rows;
    const double loss = pipeline.runtime().step(x, y).loss();
    optimizer.step(0.01);
    optimizer.zero_grad();
    if (context.rank == 0) fmt::print("step {}: loss {:.5f}\n", step + 1, loss);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (per_rank) print_passes(pipeline.runtime(), *context.world);
  if (context.rank == 0) {
    fmt::print("{} rank(s), {} chunk(s), {}: {:.2f} ms a step\n", ranks, options.chunks,
               pipeline.runtime().schedule().name, 1e3 * took.count() / options.steps);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  recipe::Program program;
  program.init().loads_kernels_at_start = true;  // a pipeline over NCCL needs it
  const bool& per_rank = program.add_per_rank_flag();
  program.add_option("--net", options.net)->check(CLI::IsMember({"cnn", "toy"}));
  program.add_option("--data", options.data, "folder with CIFAR-10's binary files, or synthetic");
  program.add_option("--images", options.images, "the first of the training set; 0: all, or 640 synthetic ones")
      ->check(recipe::at_least(0));
  program.add_option("--schedule", options.schedule, "GPipe, 1F1B or ZB1P");
  program.add_option("--chunks", options.chunks, "micro-batches of a batch of 64")->check(CLI::Range(1, 64));
  program.add_option("--steps", options.steps)->check(CLI::Range(1, 100000));
  return program.run(argc, argv, [&](const auto& context) { return train(context, options, per_rank); });
}
