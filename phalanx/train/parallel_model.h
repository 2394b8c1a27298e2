// The model of a training run under whichever forms of parallelism its plan has.
//
//   ParallelModel model(config, plan, world, device);          // collective
//   model.initialise(seed);
//   model.values_were_loaded();
//   { const auto part = model.no_sync(); loss.backward(); } // gradients are only accumulated
//   loss.backward();                                           // averaged
//   clip_grad_norm(model.parameters(), 1.0, model.grad_norm_group());
//
// Without sharding every data rank holds the whole model (DistributedDataParallel); with it, its rows of every
// parameter (FullyShardedDataParallel). Tensor parallelism cuts the matrices first, a pipeline the layers
// (pipeline_model.h). Where any of them is cut the model must be run by all ranks together.
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
  /// The parameters have no values yet.
  ParallelModel(const TrainConfig& config, const RunPlan& plan, std::shared_ptr<Communicator> world, at::Device device);

  /// In a pipeline: without memory.
  models::Llama& model() noexcept { return *model_; }
  const models::Llama& model() const noexcept { return *model_; }
  /// What this rank runs: the model, or its stages of a pipeline.
  std::vector<nn::Module*> modules() const;
  /// Whether all ranks must run the model together, because none has all of it.
  bool is_model_sharded() const noexcept {
    return plan_.parallel.dp_shard > 1 || plan_.parallel.uses_model_parallelism();
  }
  /// Of a forward pass on which no gradient is wanted, 0-dim.
  at::Tensor loss(const at::Tensor& inputs, const at::Tensor& labels);
  /// Whether the model is a pipeline: it is then trained by train_pipeline() alone, not by model() and no_sync().
  bool has_stages() const noexcept { return pipeline_ != nullptr; }
  /// Forward and backward passes of a whole step of this data rank; the mean loss, 0-dim. Gradients are averaged, and
  /// `loss_scale` times as large.
  at::Tensor train_pipeline(const at::Tensor& inputs, const at::Tensor& labels, double loss_scale,
                            observe::TraceRecorder* trace = nullptr);
  /// What this rank holds of the weights, to be filled.
  std::vector<NamedTensor> weights() const;
  /// These, and copies of them that other stages hold: who has the same part of one has the same bits.
  std::vector<NamedTensor> replicated_weights() const;
  /// What this rank trains; not before values_were_loaded().
  const std::vector<NamedTensor>& parameters() const;

  void initialise(std::uint64_t seed);
  /// Collective. To be called before the first step, and whenever weights() have been written to since.
  void values_were_loaded();

  /// For all micro-batches of a step but the last: while what it returns is alive, backward() only accumulates, whole
  /// gradients or, where a sharded model's are reduced in every micro-batch, this rank's rows. Not of a pipeline.
  std::shared_ptr<void> no_sync();
  /// All that this model's training talks over, the world first.
  std::vector<std::shared_ptr<Communicator>> communicators() const;
  /// Who adds up the gradient norm with this rank; null: each rank has it all.
  Communicator* grad_norm_group() const;

  /// Appends "model.<name>" and what belongs to the form of parallelism.
  void collect_state(TrainState& state) const;
  /// Collective: whole parameters on rank 0, an empty list on the others.
  std::vector<NamedTensor> full_weights_on_rank0() const;

  const DeviceMesh& mesh() const noexcept { return mesh_; }
  std::string layout() const;  // "4 ranks, ZeRO-3 over 2, replicated 2 times"
  /// What this rank holds all the time, the optimizer left out; of buffers, gathered units and units' gradients.
  observe::MemoryCounts held() const;
  std::string memory_text() const;  // bytes of weights, gradients and optimizer state on this rank

 private:
  std::shared_ptr<Communicator> replicate_group() const;
  std::vector<const FullyShardedDataParallel*> shardings() const;  // of the model, or of this rank's stages

  std::shared_ptr<Communicator> world_;
  DeviceMesh mesh_;
  std::shared_ptr<Communicator> replicas_;  // whose gradients are averaged, where nothing is sharded
  RunPlan plan_;
  std::int64_t optimizer_copies_ = 2;
  std::string stage_text_;
  bool keeps_full_gradients_ = false, reduces_each_microbatch_ = true;
  std::shared_ptr<models::Llama> model_;
  bool are_attached_ = false;  // to what averages gradients
  std::unique_ptr<PipelineModel> pipeline_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<FullyShardedDataParallel> sharded_;
};

}  // namespace phalanx::train
