// PipelineRuntime: executes any valid schedule (schedule/schedule.h) on the ranks of a pipeline.
//
//   const auto schedule = schedule::make_schedule({.name = "1F1B", .ranks = 4, .micro_batches = 8});
//   const auto parts = models::balance_llama(config, schedule.stages(), seq);
//   std::vector<PipelineStage> stages;                                      // those of this rank
//   for (const int s : schedule.stages_of(mesh.coordinate("pp"))) {
//     auto part = std::make_shared<models::Llama>(config, parts[s]);
//     nn::initialise(*part, seed);
//     stages.push_back(parts[s].head ? make_loss_stage(s, part) : make_stage(s, part));
//   }
//   PipelineRuntime pipeline(mesh.communicator("pp"), schedule, stages);
//   ...
//   const double loss = pipeline.step(tokens, labels).loss();               // forward and backward; then
//   optimizer.step()
//
// Contract
// - Constructor, step(), evaluate() and forward() are collective over the communicator, which belongs to the pipeline
//   meanwhile. A compute schedule gets its transfers here (add_transfers()). A schedule that is wrong, stages that are
//   not those of the rank, and a last stage without a loss are ConfigErrors on that rank.
// - The batch is cut along dimension 0 into equal micro-batches. Inputs are used on the rank of the first stage and
//   targets on that of the last: elsewhere they may be undefined.
// - Gradients are added to parameters' .grad(): those of the mean of the micro-batches' losses, or of their sum.
//   grad_ready comes once a step for each parameter (stage_gradients.h), outside any backward pass: attach
//   DistributedDataParallel to the rank's stages together (a ModuleList of them), or to each, and no no_sync() is
//   needed.
// - Every stage's output has one shape and dtype, that of its first micro-batch, in all steps; evaluate() and forward()
//   may use others. Another one is an Error on every rank: stage, micro-batch, expected, found.
// - Sends and receives go on while passes run. What is posted, and when, is schedule::post() of the schedule: where
//   messages have tags, receives where the schedule says and one more ahead; over nccl, groups in an order in which no
//   rank waits for ever. Constructing it checks that (schedule::check_deadlock()): a ConfigError names the cycle.
// - A stage sharded by FullyShardedDataParallel says so (PipelineStage::sharding): its gradients are then averaged once
//   a step, unit by unit as they become complete. Units stay gathered for the step, or come and go with every pass, as
//   FullyShardOptions say. UNSHARD gathers ahead, RESHARD lets go of units that come and go; REDUCE_GRAD has nothing
//   left to do. All three call hooks, too. An overlap's parts run one after the other.
// - The losses are the same on every rank.
// - What a pass throws leaves step() as an Error that names rank, stage and action; the communicator is aborted, and
//   the other ranks' step() throws a CommError with the same words. The pipeline is of no use then.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/parallel/pipeline/stage.h"
#include "phalanx/parallel/pipeline/stage_executor.h"
#include "phalanx/schedule/schedule.h"
#include "phalanx/schedule/timeline.h"

namespace phalanx {

enum class PipelineLoss { mean, sum };  // of the micro-batches' losses: what is differentiated

struct PipelineOptions {
  PipelineLoss loss = PipelineLoss::mean;
  WeightSplit weight_split = WeightSplit::automatic;
  std::optional<int> receives_ahead;  // of its turn; nothing: 1 where messages have tags, else 0
  // Called by UNSHARD, RESHARD and REDUCE_GRAD of a stage, where set.
  std::function<void(int stage)> unshard, reshard, reduce_gradients;
};

struct PipelineResult {
  std::vector<double> losses;       // of each micro-batch, on every rank; empty where there was no target
  std::vector<at::Tensor> outputs;  // of forward(), by micro-batch, on the last stage's rank
  double loss() const;              // their mean
};

using schedule::ExecutedPass;  // in seconds since the step began on this rank

struct PipelineStatistics {
  int peak_live_activations = 0;     // of the last step, on this rank: micro-batches of a stage between F and B or W
  std::int64_t sent_bytes = 0;       // to other stages, by this rank, so far
  std::vector<ExecutedPass> passes;  // of the last step, on this rank
  std::chrono::steady_clock::time_point began;  // it: one clock for all ranks of a machine
};

class PipelineRuntime {
 public:
  PipelineRuntime(std::shared_ptr<Communicator> comm, schedule::Schedule schedule, std::vector<PipelineStage> stages,
                  PipelineOptions options = {});
  ~PipelineRuntime();
  PipelineRuntime(const PipelineRuntime&) = delete;
  PipelineRuntime& operator=(const PipelineRuntime&) = delete;

  /// Forward and backward of a whole batch; or of micro-batches, one tensor each.
  PipelineResult step(const at::Tensor& inputs, const at::Tensor& targets);
  PipelineResult step(std::vector<at::Tensor> inputs, std::vector<at::Tensor> targets);

  /// All gradients of the steps to come are multiplied by it (loss scaling in float16). 1 at first; the same on all
  /// ranks.
  void scale_gradients(double factor);

  /// The losses without a graph; the schedule's forward passes only.
  PipelineResult evaluate(const at::Tensor& inputs, const at::Tensor& targets);
  /// The last stage's outputs without a graph.
  PipelineResult forward(const at::Tensor& inputs);

  const schedule::Schedule& schedule() const noexcept;  // with its transfers
  const PipelineStatistics& statistics() const noexcept;
  /// Names of the parameters that have copies on several stages, of which this rank has one.
  std::vector<std::string> tied_names() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phalanx
