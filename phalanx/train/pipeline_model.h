// PipelineModel holds this rank's pipeline stages of the model of a training run, and the schedule that runs them.
//
//   PipelineModel pipeline(config, plan, mesh, device, full_model);  // collective
//   pipeline.initialise(seed);
//   pipeline.average_over(replicas);                                 // DistributedDataParallel around each stage
//   const double loss = pipeline.train(tokens, labels);              // a whole step of this data-parallel rank
//   for (const NamedTensor& weight : pipeline.weights()) print(weight.name);  // the full model's names, on every rank
//
// Every rank lists all parameters of the model, in one order. Of the parameters of other stages it holds nothing: an
// empty box of a split over the axis "pp". So the optimizer, clipping, checkpoints and verify treat stages as any other
// split. Stages may also be sharded: a rank then lists its rows.
//
// Tied embeddings are on the first and on the last stage. The weights are those of the last stage: they are listed,
// stepped and saved. The first stage gets their values before the next pass.
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
  /// `whole`: the full model without memory, already cut by tensor parallelism in the way its stages will be.
  PipelineModel(const TrainConfig& config, const RunPlan& plan, const DeviceMesh& mesh, at::Device device,
                const models::Llama& whole);

  void initialise(std::uint64_t seed);
  /// Collective over `replicas`, the data-parallel group that averages the gradients from now on.
  /// REQUIRES: the stages are not sharded.
  void average_over(const std::shared_ptr<Communicator>& replicas);
  const std::vector<NamedTensor>& weights() const noexcept { return weights_; }
  /// This rank's copies of weights that another stage owns. They have the owner's values during a step.
  const std::vector<NamedTensor>& copies() const noexcept { return copies_; }
  /// Call it after weights() have been written to, except by the optimizer step after train().
  void invalidate_unsharded();
  /// The sharded wrappers of this rank's stages; empty if the stages are not sharded.
  std::vector<const FullyShardedDataParallel*> shardings() const;

  /// This rank's stages.
  const std::vector<std::shared_ptr<models::Llama>>& models() const noexcept { return models_; }

  /// Runs the forward and backward passes of all micro-batches. Returns the mean loss, on every rank of the pipeline.
  /// Gradients are those of `loss_scale` times the loss. With a recorder each pass becomes a span such as "2F0" of the
  /// category "pass", also if a pass throws.
  double train(const at::Tensor& inputs, const at::Tensor& labels, double loss_scale = 1.0,
               observe::TraceRecorder* trace = nullptr);
  /// The same without gradients, for any number of sequences, as one micro-batch.
  double evaluate(const at::Tensor& inputs, const at::Tensor& labels);

  std::string text() const;  // "pipeline over 2 (1F1B, 8 micro-batches)"

 private:
  /// A weight that more than one stage holds. The last of these stages owns it.
  struct Copied {
    at::Tensor owned, copy;  // on this rank; undefined elsewhere
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
  std::vector<std::shared_ptr<models::Llama>> models_;              // of numbers_
  std::vector<std::unique_ptr<FullyShardedDataParallel>> sharded_;  // one for each of models_, or none
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
