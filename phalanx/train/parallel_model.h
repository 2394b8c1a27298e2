// ParallelModel wraps the model of a training run in all the forms of parallelism of its plan.
//
//   ParallelModel model(config, plan, world, device);          // collective
//   model.initialise(seed);
//   model.values_were_loaded();
//   {
//     const auto guard = model.no_sync();                      // gradients are only accumulated
//     model.model().loss(inputs, labels).backward();
//   }
//   model.model().loss(more_inputs, more_labels).backward();   // gradients are averaged
//   clip_grad_norm(model.parameters(), 1.0, model.grad_norm_group());
//
// Without sharding every data-parallel rank holds the whole model (DistributedDataParallel). With sharding it holds its
// rows of every parameter (FullyShardedDataParallel). Tensor parallelism cuts the matrices first, a pipeline the layers
// (pipeline_model.h). If the model is cut in any of these ways, all ranks must run it together.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/tensor/train_state.h"
#include "phalanx/train/pipeline_model.h"

namespace phalanx::train {

class ParallelModel {
 public:
  /// Collective. The parameters have no values yet.
  ParallelModel(const TrainConfig& config, const RunPlan& plan, std::shared_ptr<Communicator> world, at::Device device);

  /// In a pipeline this model has no memory for its parameters.
  models::Llama& model() noexcept { return *model_; }
  const models::Llama& model() const noexcept { return *model_; }
  /// The modules this rank runs: the model, or its stages of a pipeline.
  std::vector<nn::Module*> modules() const;
  /// Whether all ranks must run the model together, because no rank has all of it.
  bool is_model_sharded() const noexcept {
    return plan_.parallel.dp_shard > 1 || plan_.parallel.uses_model_parallelism();
  }
  /// The loss of a forward pass without gradients, 0-dim.
  at::Tensor loss(const at::Tensor& inputs, const at::Tensor& labels);
  /// Whether the model is a pipeline. A pipeline is trained only by train_pipeline(), not by model() and no_sync().
  bool has_stages() const noexcept { return pipeline_ != nullptr; }
  /// Runs the forward and backward passes of a whole step of this data-parallel rank. Returns the mean loss, 0-dim.
  /// Gradients are averaged and multiplied by `loss_scale`.
  at::Tensor train_pipeline(const at::Tensor& inputs, const at::Tensor& labels, double loss_scale,
                            observe::TraceRecorder* trace = nullptr);
  /// This rank's shards of the weights, to be filled.
  std::vector<NamedTensor> weights() const;
  /// These, and copies of them that other stages hold. Ranks that hold the same part of a weight have the same bits.
  std::vector<NamedTensor> replicated_weights() const;
  /// The parameters this rank trains.
  /// REQUIRES: values_were_loaded() has been called.
  const std::vector<NamedTensor>& parameters() const;

  void initialise(std::uint64_t seed);
  /// Collective. Call it before the first step, and whenever weights() have been written to since.
  void values_were_loaded();

  /// For all micro-batches of a step except the last. While the returned object is alive, backward() only accumulates:
  /// full gradients or, where a sharded model reduces gradients in every micro-batch, this rank's rows.
  /// REQUIRES: the model is not a pipeline.
  std::shared_ptr<void> no_sync();
  /// All communicators that training this model uses, the world first.
  std::vector<std::shared_ptr<Communicator>> communicators() const;
  /// The group that sums the gradient norm; null: each rank has all gradients.
  Communicator* grad_norm_group() const;

  /// Appends "model.<name>" and the state of the form of parallelism.
  void collect_state(TrainState& state) const;
  /// Collective. Full parameters on rank 0, an empty list on the others.
  std::vector<NamedTensor> full_weights_on_rank0() const;

  const DeviceMesh& mesh() const noexcept { return mesh_; }
  std::string layout() const;  // "4 ranks, ZeRO-3 over 2, replicated 2 times"
  /// The memory this rank always holds, without the optimizer: also buffers, unsharded units and units' gradients.
  observe::MemoryCounts held() const;
  std::string memory_text() const;  // bytes of weights, gradients and optimizer state on this rank

 private:
  std::shared_ptr<Communicator> replicate_group() const;
  std::vector<const FullyShardedDataParallel*> shardings() const;  // of the model, or of this rank's stages

  std::shared_ptr<Communicator> world_;
  DeviceMesh mesh_;
  std::shared_ptr<Communicator> replicas_;  // the data-parallel group that averages gradients, if nothing is sharded
  RunPlan plan_;
  std::int64_t optimizer_copies_ = 2;
  std::string stage_text_;
  bool keeps_full_gradients_ = false, reduces_each_microbatch_ = true;
  std::shared_ptr<models::Llama> model_;
  bool are_attached_ = false;  // the hooks that average gradients
  std::unique_ptr<PipelineModel> pipeline_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<FullyShardedDataParallel> sharded_;
};

}  // namespace phalanx::train
