// The model of a training run as pipeline stages: this rank's, with the schedule that runs them.
//
//   PipelineModel pipeline(config, plan, mesh, device, whole);       // collective
//   pipeline.initialise(seed);
//   pipeline.average_over(replicas);                                 // DistributedDataParallel around each stage
//   const double loss = pipeline.train(tokens, labels);              // a whole step of this data rank
//   for (const NamedTensor& weight : pipeline.weights()) ...         // the whole model's, on every rank
//
// Every rank lists all parameters of the model, in one order: of those of other stages it holds nothing, an empty box
// of a split over the axis "pp". So optimizer, clipping, checkpoints and verify treat stages as any other split.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/parallel/ddp.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/tensor/named.h"
#include "phalanx/train/run_plan.h"

namespace phalanx::train {

class PipelineModel {
 public:
  /// `whole`: the model without memory, cut by tensor parallelism as its stages are to be.
  PipelineModel(const TrainConfig& config, const RunPlan& plan, const DeviceMesh& mesh, at::Device device,
                const models::Llama& whole);

  void initialise(std::uint64_t seed);
  /// Collective over `replicas`, whose gradients are averaged from now on.
  void average_over(const std::shared_ptr<Communicator>& replicas);
  const std::vector<NamedTensor>& weights() const noexcept { return weights_; }

  /// Forward and backward passes of all micro-batches; the mean loss, on every rank of the pipeline.
  double train(const at::Tensor& inputs, const at::Tensor& labels);
  /// The same without gradients, of any number of sequences, as one micro-batch.
  double evaluate(const at::Tensor& inputs, const at::Tensor& labels);

  std::string text() const;  // "pipeline over 2 (1F1B, 8 micro-batches)"

 private:
  std::vector<NamedTensor> list_weights(const models::Llama& whole, const DeviceMesh& mesh) const;
  std::vector<PipelineStage> stages() const;

  schedule::Schedule schedule_;
  std::shared_ptr<Communicator> ranks_;
  std::vector<models::LlamaPart> parts_;                // of all stages
  std::vector<int> numbers_;                            // of this rank's stages
  std::vector<std::shared_ptr<models::Llama>> models_;  // these
  std::vector<NamedTensor> weights_;
  std::vector<std::unique_ptr<DistributedDataParallel>> ddp_;
  std::unique_ptr<PipelineRuntime> runtime_, evaluation_;
};

}  // namespace phalanx::train
