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
//   const double loss = pipeline.step(tokens, labels).loss();               // forward and backward
//   optimizer.step(lr);
//
// Contract
// - The constructor, step(), evaluate() and forward() are collective over the communicator. Nothing else may use it
//   meanwhile. The constructor adds the transfers to a compute schedule (add_transfers()). An invalid schedule, stages
//   that do not belong to this rank, and a last stage without a loss throw ConfigError on that rank.
// - The batch is cut along dimension 0 into equal micro-batches. Only the rank of the first stage uses the inputs, and
//   only that of the last stage uses the targets. On other ranks they may be undefined.
// - Gradients are added to the parameters' .grad(). They are those of the mean of the micro-batches' losses, or of
//   their sum. grad_ready fires once per step for each parameter (stage_gradients.h), outside any backward pass. So
//   attach DistributedDataParallel to all of the rank's stages together (a ModuleList of them) or to each. No no_sync()
//   is needed.
// - Every stage's output has one shape and dtype in all steps: that of its first micro-batch. evaluate() and forward()
//   may use others. A different shape or dtype throws an Error on every rank: stage, micro-batch, expected, found.
// - Sends and receives overlap with the passes. schedule::post() of the schedule decides what is posted, and when. On
//   backends with message tags, receives are posted where the schedule has them and one more ahead. Over NCCL,
//   transfers are posted in groups, in an order in which no rank waits forever. The constructor checks this
//   (schedule::check_deadlock()): a ConfigError names the cycle.
// - If FullyShardedDataParallel shards a stage, set PipelineStage::sharding. The stage's gradients are then averaged
//   once per step, unit by unit as they become complete. Units stay unsharded for the step, or are unsharded for every
//   pass, as FullyShardOptions say. UNSHARD unshards ahead of use. RESHARD reshards the units that are unsharded for
//   every pass. REDUCE_GRAD has nothing left to do. All three also call hooks. The parts of an overlapped action run
//   one after the other.
// - The losses are the same on every rank.
// - If a pass throws, step() throws an Error that names rank, stage and action. The communicator is aborted, and step()
//   on the other ranks throws a CommError with the same message. The pipeline cannot be used any more.
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
  std::optional<int> receives_ahead;  // receives posted ahead of their turn; unset: 1 with message tags, else 0
  // If set, called by UNSHARD, RESHARD and REDUCE_GRAD of a stage.
  std::function<void(int stage)> unshard, reshard, reduce_gradients;
};

struct PipelineResult {
  std::vector<double> losses;       // of each micro-batch, on every rank; empty if there was no target
  std::vector<at::Tensor> outputs;  // of forward(), by micro-batch, on the last stage's rank
  PipelineLoss reduction = PipelineLoss::mean;
  double loss() const;  // their mean or sum
};

using schedule::ExecutedPass;  // in seconds since the step began on this rank

struct PipelineStatistics {
  int peak_live_activations = 0;     // of the last step, on this rank: micro-batches of a stage between F and B or W
  std::int64_t sent_bytes = 0;       // to other stages, by this rank, so far
  std::vector<ExecutedPass> passes;  // of the last step, on this rank
  std::chrono::steady_clock::time_point began;  // start of the last step; ranks of a node share the clock
};

class PipelineRuntime {
 public:
  PipelineRuntime(std::shared_ptr<Communicator> comm, schedule::Schedule schedule, std::vector<PipelineStage> stages,
                  PipelineOptions options = {});
  ~PipelineRuntime();
  PipelineRuntime(const PipelineRuntime&) = delete;
  PipelineRuntime& operator=(const PipelineRuntime&) = delete;

  /// Forward and backward of a whole batch, or of micro-batches given as one tensor each.
  PipelineResult step(const at::Tensor& inputs, const at::Tensor& targets);
  PipelineResult step(std::vector<at::Tensor> inputs, std::vector<at::Tensor> targets);

  /// As step(), but the host does not wait for the losses. Returns their mean or sum: 0-dim float64 on the stages'
  /// device, the same on every rank.
  at::Tensor queue_step(const at::Tensor& inputs, const at::Tensor& targets);

  /// Multiplies all gradients of the following steps by `factor` (loss scaling in float16). It is 1 at first.
  /// REQUIRES: the same factor on all ranks.
  void scale_gradients(double factor);
  /// The same with a 0-dim tensor on the stages' device. Each backward pass reads its value of then, without a wait.
  void scale_gradients(at::Tensor factor);

  /// Returns the losses without recording a graph. Runs only the schedule's forward passes.
  PipelineResult evaluate(const at::Tensor& inputs, const at::Tensor& targets);
  /// Returns the last stage's outputs without recording a graph.
  PipelineResult forward(const at::Tensor& inputs);

  const schedule::Schedule& schedule() const noexcept;  // with its transfers
  const PipelineStatistics& statistics() const noexcept;
  /// Names of the tied parameters of which this rank has a copy: those with copies on several stages.
  std::vector<std::string> tied_names() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phalanx
