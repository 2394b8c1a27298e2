// Pipeline parallelism written out, forward and backward, and the same through the library.
//
// By hand (pipeline_by_hand.h): the layers of the deep MLP are divided over the ranks, the batch into 4 micro-batches.
// Activations go to the next rank while the next micro-batch is computed, and gradients come back in the same way. The
// receive of the next micro-batch is posted before the current one is computed. Through the library: two schedules,
// GPipe, which is the one written out here, and 1F1B, which saves fewer activations. All give the losses of one rank.
// --per-rank shows the passes of each stage in the first step. Worlds of 1, 2 and 4: pipeline_by_hand --spawn 1,2,4.
//
//   $ phalanx launch --nproc-per-node 2 -- pipeline_by_hand --per-rank
//   rank 0: forward of micro-batch 0: 32 x 1024 [-0.101 0.520 -0.170 ...]
//   rank 0: forward of micro-batch 1: 32 x 1024 [-0.019 -0.074 -0.059 ...]
//   rank 0: forward of micro-batch 2: 32 x 1024 [-0.159 0.382 -0.084 ...]
//   rank 0: forward of micro-batch 3: 32 x 1024 [0.118 1.776 -0.030 ...]
//   rank 0: backward of micro-batch 0
//   rank 0: backward of micro-batch 1
//   rank 0: backward of micro-batch 2
//   rank 0: backward of micro-batch 3
//   rank 1: forward of micro-batch 0: 32 x 1024 [-0.055 0.170 -0.053 ...]
//   rank 1: forward of micro-batch 1: 32 x 1024 [-0.103 0.008 0.048 ...]
//   rank 1: forward of micro-batch 2: 32 x 1024 [-0.002 0.132 0.048 ...]
//   rank 1: forward of micro-batch 3: 32 x 1024 [0.299 0.015 0.053 ...]
//   rank 1: backward of micro-batch 0
//   rank 1: backward of micro-batch 1
//   rank 1: backward of micro-batch 2
//   rank 1: backward of micro-batch 3
//   step 1: by hand 0.0130475, GPipe 0.0130475, 1F1B 0.0130475, one rank 0.0130475
//   step 2: by hand 0.0033893, GPipe 0.0033893, 1F1B 0.0033893, one rank 0.0033893
//   step 3: by hand 0.0015080, GPipe 0.0015080, 1F1B 0.0015080, one rank 0.0015080
//   step 4: by hand 0.0010713, GPipe 0.0010713, 1F1B 0.0010713, one rank 0.0010713
//   step 5: by hand 0.0008396, GPipe 0.0008396, 1F1B 0.0008396, one rank 0.0008396
//   2 rank(s): micro-batches alive on rank 0: GPipe 4, 1F1B 2; losses differ by 1.1e-07: the same
#include <fmt/format.h>

#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/schedule/generators.h"
#include "recipes/deep_mlp.h"
#include "recipes/pipeline_by_hand.h"
#include "recipes/recipe.h"

namespace {

/// This rank's layers.
std::shared_ptr<deep_mlp::Net> part_of(const phalanx::ProcessContext& context) {
  const int each = deep_mlp::kLayers / context.world_size;
  if (each * context.world_size != deep_mlp::kLayers) {
    throw phalanx::UsageError("the net has 4 layers: start 1, 2 or 4 ranks");
  }
  auto part = std::make_shared<deep_mlp::Net>(context.device, context.rank * each, (context.rank + 1) * each);
  phalanx::nn::initialise(*part, deep_mlp::kSeed);
  return part;
}

recipe::Losses train_by_hand(const phalanx::ProcessContext& context, const at::Tensor& batch, bool per_rank) {
  const auto part = part_of(context);
  PipelineByHand by_hand(*context.world, *part, context.device);
  auto losses = deep_mlp::train(phalanx::nn::named_parameters(*part), [&] {
    const bool is_first_step = by_hand.log().empty();
    const double loss = by_hand.step(batch);
    if (per_rank && is_first_step) recipe::print_by_rank(*context.world, by_hand.log());
    return loss;
  });
  return {"by hand", losses};
}

/// Also how many micro-batches were alive at once.
std::pair<recipe::Losses, int> train_by_library(const phalanx::ProcessContext& context, const at::Tensor& batch,
                                                const char* schedule) {
  const auto part = part_of(context);
  const auto loss_of = [](const at::Tensor& y, const at::Tensor&) { return deep_mlp::loss_of(y); };
  phalanx::PipelineRuntime pipeline(
      context.world,
      phalanx::schedule::make_schedule(
          {.name = schedule, .ranks = context.world_size, .micro_batches = PipelineByHand::kMicroBatches}),
      {phalanx::make_stage(context.rank, part, loss_of)});
  auto losses =
      deep_mlp::train(phalanx::nn::named_parameters(*part), [&] { return pipeline.step(batch, batch).loss(); });
  return {{schedule, losses}, pipeline.statistics().peak_live_activations};
}

bool compare(const phalanx::ProcessContext& context, bool per_rank) {
  const at::Tensor batch = deep_mlp::rows_of(0, 1, context.device);
  const auto by_hand = train_by_hand(context, batch, per_rank);
  const auto [gpipe, gpipe_alive] = train_by_library(context, batch, "GPipe");
  const auto [one_f_one_b, one_f_one_b_alive] = train_by_library(context, batch, "1F1B");
  if (context.rank != 0) return true;
  const double apart =
      recipe::print_losses({by_hand, gpipe, one_f_one_b, {"one rank", deep_mlp::train_alone(context.device)}});
  fmt::print("{} rank(s): micro-batches alive on rank 0: GPipe {}, 1F1B {}; losses differ by {:.1e}: {}\n",
             context.world_size, gpipe_alive, one_f_one_b_alive, apart, recipe::verdict(apart <= 1e-5));
  return apart <= 1e-5;
}

}  // namespace

int main(int argc, char** argv) {
  recipe::Program program;
  program.init().loads_kernels_at_start = true;  // a pipeline over NCCL needs it
  const bool& per_rank = program.add_per_rank_flag();
  return program.run(argc, argv, [&](const auto& context) { return compare(context, per_rank); });
}
