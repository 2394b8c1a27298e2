// The model of a training run as pipeline stages: this rank's, with the schedule that runs them.
//
//   PipelineModel pipeline(config, plan, mesh, device, whole);       // collective
//   pipeline.initialise(seed);
//   pipeline.average_over(replicas);                                 // DistributedDataParallel around each stage
//   const double loss = pipeline.train(tokens, labels);              // a whole step of this data rank
//   for (const NamedTensor& weight : pipeline.weights()) ...         // the whole model's, on every rank
//
// Every rank lists all parameters of the model, in one order: of those of other stages it holds nothing, an empty box
// of a split over the axis "pp". So optimizer, clipping, checkpoints and verify treat stages as any other split. Stages
// may be sharded in turn: a rank then lists its rows.
//
// Tied embeddings are on the first and on the last stage. The last one's are the weights: they are listed, stepped and
// saved; the first one gets their values before the next pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/config/run_plan.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/observe/trace.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

class PipelineModel {
 public:
  /// `whole`: the model without memory, cut by tensor parallelism as its stages are to be.
  PipelineModel(const TrainConfig& config, const RunPlan& plan, const DeviceMesh& mesh, at::Device device,
                const models::Llama& whole);

  void initialise(std::uint64_t seed);
  /// Collective over `replicas`, whose gradients are averaged from now on. Not of sharded stages.
  void average_over(const std::shared_ptr<Communicator>& replicas);
  const std::vector<NamedTensor>& weights() const noexcept { return weights_; }
  /// What this rank's stages hold of weights that another one owns: the same values during a step.
  const std::vector<NamedTensor>& copies() const noexcept { return copies_; }
  /// To be called when weights() have been written to, but by the step after train().
  void invalidate_unsharded();
  /// Of this rank's stages, where they are sharded.
  std::vector<const FullyShardedDataParallel*> shardings() const;

  /// This rank's stages.
  const std::vector<std::shared_ptr<models::Llama>>& models() const noexcept { return models_; }

  /// Forward and backward passes of all micro-batches; the mean loss, on every rank of the pipeline. Gradients are
  /// those of `loss_scale` times the loss. With a recorder each pass becomes a span "2F0" of the category "pass", also
  /// where one of them throws.
  double train(const at::Tensor& inputs, const at::Tensor& labels, double loss_scale = 1.0,
               observe::TraceRecorder* trace = nullptr);
  /// The same without gradients, of any number of sequences, as one micro-batch.
  double evaluate(const at::Tensor& inputs, const at::Tensor& labels);

  std::string text() const;  // "pipeline over 2 (1F1B, 8 micro-batches)"

 private:
  /// What more than one stage holds: the last of them owns it.
  struct Copied {
    at::Tensor owned, copy;  // here; undefined elsewhere
    int owner = 0, rank = 0;
  };
  std::vector<NamedTensor> list_weights(const models::Llama& whole, const DeviceMesh& mesh);
  std::vector<NamedTensor> held_by(std::size_t model) const;
  std::vector<PipelineStage> stages() const;
  void copy_shared_weights();

  schedule::Schedule schedule_;
  std::shared_ptr<Communicator> ranks_;
  bool is_measured_;
  std::vector<models::LlamaPart> parts_;                            // of all stages
  std::vector<int> numbers_;                                        // of this rank's stages
  std::vector<std::shared_ptr<models::Llama>> models_;              // these
  std::vector<std::unique_ptr<FullyShardedDataParallel>> sharded_;  // as many, or none
  std::vector<NamedTensor> weights_;
  std::vector<Copied> copied_;
  std::vector<NamedTensor> copies_;
  bool copies_are_old_ = true;
  std::optional<at::ScalarType> autocast_;
  at::Device device_;
  std::vector<std::unique_ptr<DistributedDataParallel>> ddp_;
  std::unique_ptr<PipelineRuntime> runtime_, evaluation_;
};

}  // namespace phalanx::train
