// ParallelModel: the model of a training run under whichever forms of parallelism its plan has. Three kinds, by how the
// ranks share it, and each looks the same to the trainer:
//
//   ReplicatedModel   every data rank holds the whole model                     (replicated_model.h)
//   ShardedModel      every data rank holds its rows of every parameter, FSDP   (sharded_model.h)
//   PipelinedModel    every rank holds some stages, replicated or sharded       (pipelined_model.h)
//
// Tensor parallelism cuts the matrices of any of them (parallelize.h).
//
//   auto model = make_parallel_model(config, plan, world, device);        // collective
//   model->initialise(seed);
//   model->values_were_loaded();
//   at::Tensor loss = model->forward_backward(batch, pass);  // this batch's gradients; in a pipeline the whole step's
//   clip_grad_norm(model->parameters(), 1.0, model->grad_norm_group());
//
// Collective: all ranks of the world call the same methods in the same order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/config/training_shape.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/tensor/train_state.h"
#include "phalanx/train/model/expert_load.h"
#include "phalanx/train/model/expert_mesh.h"
#include "phalanx/train/model/optimizer_step.h"
#include "phalanx/train/model/preference_loss.h"
#include "phalanx/train/model/token_batch.h"
#include "phalanx/train/profiling/profiler.h"

namespace phalanx::train {

/// How one batch of a step is run.
struct ForwardBackwardPass {
  const OptimizerStep& optimizer_step;  // knows the loss scale
  double divisor = 1;                   // of the sum of the losses: how many tokens or pairs the global batch has
  std::int64_t step = 0;                // counted from 0
  std::int64_t first_row = 0;           // of this batch in the global batch of the step
  bool is_last = true;                  // of the step
  std::optional<at::ScalarType> autocast;
  Profiler* profiler = nullptr;
};

class ParallelModel {
 public:
  virtual ~ParallelModel() = default;
  ParallelModel(const ParallelModel&) = delete;
  ParallelModel& operator=(const ParallelModel&) = delete;

  virtual void initialise(std::uint64_t seed) = 0;
  /// Collective. Call it before the first step, and whenever weights() have been written to since.
  virtual void values_were_loaded() = 0;

  /// Forward and backward pass of this data rank's batch: the sum of the losses of its tokens, or of its pairs of
  /// preferences, divided by the divisor, 0-dim, on the device, detached. Gradients are accumulated; in the step's last
  /// pass they are summed over the data ranks, or in every pass where a sharded model reduces each.
  virtual at::Tensor forward_backward(const TokenBatch& batch, const ForwardBackwardPass& pass) = 0;
  /// The sum of the losses of the tokens, or of the pairs, in a forward pass without gradients, 0-dim.
  /// REQUIRES: gradients are off, at::NoGradGuard.
  virtual at::Tensor loss_sum(const TokenBatch& batch) = 0;

  /// Before the passes of a step.
  void begin_step() const;
  /// Has the coming forward passes of `model` add to the loss what the run asks for of routers, and count tokens of
  /// experts. For a model of these ranks, or a copy of it.
  void prepare_experts(models::Llama& model, const OptimizerStep& optimizer_step) const;
  /// Says where in the run the coming forward pass of `model` is, for its dropout and the noise of its routers.
  void place_in_run(models::Llama& model, std::int64_t step, std::int64_t first_row) const;
  /// `weights`, and behind them the biases of experts, if the run has some.
  std::vector<NamedTensor> with_expert_biases(std::vector<NamedTensor> weights) const;
  /// Has `model`, or the part of it that a rank runs, use the biases of experts, if the run has some.
  void use_expert_biases(models::Llama& model) const;
  /// Null: the model has no experts.
  const std::shared_ptr<ExpertLoad>& expert_load() const noexcept { return expert_load_; }
  /// What the losses of preferences are computed by; null: there are none.
  PreferenceLoss* preferences() const noexcept { return preferences_.get(); }
  /// What this rank runs: the model, or its stages of a pipeline.
  virtual std::vector<nn::Module*> modules() const = 0;
  /// This rank's shards of the weights, to be filled.
  virtual std::vector<NamedTensor> weights() const = 0;
  /// These, and copies of them that other stages hold: ranks that hold the same part have the same bits.
  virtual std::vector<NamedTensor> replicated_weights() const { return weights(); }
  /// What this rank trains: the weights that are not frozen. REQUIRES: values_were_loaded().
  virtual const std::vector<NamedTensor>& parameters() const = 0;
  /// Appends "model.<name>" and what belongs to the form of parallelism.
  virtual void collect_state(TrainState& state) const;

  /// The names of the weights that are not trained.
  const std::vector<std::string>& frozen() const noexcept { return frozen_; }

  /// The whole model; in a pipeline: without memory.
  models::Llama& model() noexcept { return *model_; }
  const models::Llama& model() const noexcept { return *model_; }
  /// Whether all ranks must run the model together, because none has all of it.
  bool is_model_sharded() const noexcept {
    return plan_.parallel.is_sharded() || plan_.parallel.uses_model_parallelism();
  }
  /// All that this model's training talks over, the world first; in the same order on all ranks of each group.
  std::vector<std::shared_ptr<Communicator>> communicators() const;
  /// The ranks that add up the gradient norm with this one; null: each rank has it all.
  Communicator* grad_norm_group() const;
  /// Whole parameters on rank 0, an empty list on the others. Those that are gathered for it are on the host, and the
  /// rank's device holds one of them at a time. `wanted` chooses among their names; unset: all.
  std::vector<NamedTensor> full_weights_on_rank0(const std::function<bool(const std::string&)>& wanted = {}) const;

  const DeviceMesh& mesh() const noexcept { return mesh_; }
  std::string layout() const;  // "4 ranks, ZeRO-3 over 2, replicated 2 times"
  /// Bytes that this rank holds all the time, the optimizer's left out; as buffers: gathered units and their gradients.
  observe::MemoryCounts held() const;
  std::string memory_text() const;  // bytes of weights, gradients and optimizer state on this rank

 protected:
  ParallelModel(const config::TrainConfig& config, const config::RunPlan& plan, std::shared_ptr<Communicator> world,
                at::Device device);
  /// What this rank holds of a model with these parameters, and nothing of the experts that other ranks have.
  std::vector<NamedTensor> with_other_experts(const std::vector<NamedTensor>& held,
                                              const std::vector<std::string>& names) const;
  /// Gives what this rank holds nothing of a gradient of nothing, so that the optimizer steps it, too.
  static void give_empty_gradients(const std::vector<NamedTensor>& trained);
  /// What shards the model, or this rank's stages.
  virtual std::vector<const FullyShardedDataParallel*> shardings() const { return {}; }
  virtual std::string pipeline_text() const { return ""; }
  /// Of a model that this rank has a whole forward pass of. `sync`: gradients are summed in this backward pass.
  at::Tensor run_whole_model(const TokenBatch& batch, const ForwardBackwardPass& pass, bool sync);
  at::Tensor loss_sum_of_whole_model(const TokenBatch& batch);
  /// Of a batch, or of a micro-batch; nothing if it has no pairs.
  std::optional<models::DocumentLoss> document_loss(const PreferenceBatch* batch) const;

  const std::shared_ptr<Communicator> world_;
  const DeviceMesh mesh_;
  const std::shared_ptr<const ExpertMesh> experts_;  // null: every rank has all experts
  const std::shared_ptr<Communicator> context_;      // the ranks with the same sequences; null: none
  const config::RunPlan plan_;
  const at::Device device_;
  std::shared_ptr<models::Llama> model_;                         // has no memory where it is cut in any way
  std::vector<std::shared_ptr<Communicator>> copy_groups_ = {};  // Parallelized::copy_groups
  const std::vector<std::string> frozen_;
  const double z_loss_weight_;
  const std::shared_ptr<ExpertLoad> expert_load_;  // null: no experts
  const std::unique_ptr<PreferenceLoss> preferences_;

 private:
  const config::OptimizerCopies optimizer_copies_;
  const std::vector<std::string> adamw_params_;  // of Muon
  const bool has_dropout_;
  const double load_weight_;                        // of each sequence on each rank
  const double router_z_weight_;                    // of each token on each rank
  const bool counts_sequences_;                     // each by itself, for the loss that evens out the load
  const std::shared_ptr<Communicator> load_group_;  // the ranks with other tokens of one unit of it; null: none
  const double jitter_eps_, capacity_factor_;       // of routers and experts
  const std::uint64_t seed_;                        // of dropout and noise
  const std::string sharding_text_;
  const bool keeps_full_gradients_;
};

std::unique_ptr<ParallelModel> make_parallel_model(const config::TrainConfig& config, const config::RunPlan& plan,
                                                   std::shared_ptr<Communicator> world, at::Device device);

}  // namespace phalanx::train
