// PipelinedModel: every rank holds some stages of the model and the schedule that runs them.
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

#include "phalanx/observe/trace.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/train/model/parallel_model.h"

namespace phalanx::train {

class PipelinedModel final : public ParallelModel {
 public:
  PipelinedModel(const config::TrainConfig& config, const config::RunPlan& plan, std::shared_ptr<Communicator> world,
                 at::Device device);

  void initialise(std::uint64_t seed) override;
  void values_were_loaded() override;
  /// All micro-batches of a step: `pass.is_last` is ignored here. With a recorder each pass becomes a
  /// span "2F0" of the category "pass", also where one of them throws.
  at::Tensor forward_backward(const TokenBatch& batch, const ForwardBackwardPass& pass) override;
  /// Of any number of sequences, as one micro-batch.
  at::Tensor loss_sum(const TokenBatch& batch) override;
  std::vector<nn::Module*> modules() const override;
  std::vector<NamedTensor> weights() const override { return weights_; }
  std::vector<NamedTensor> replicated_weights() const override;
  const std::vector<NamedTensor>& parameters() const override { return trained_; }

 private:
  std::vector<const FullyShardedDataParallel*> shardings() const override;
  std::string pipeline_text() const override;  // "pipeline over 2 (1F1B, 8 micro-batches)"
  at::Tensor train(const TokenBatch& batch, const ForwardBackwardPass& pass, observe::TraceRecorder* trace);
  /// Gives the stages what they need of a batch that is cut into `micro_batches`, beside tokens and labels.
  void describe_batch(const TokenBatch& batch, std::int64_t micro_batches, double divisor, double z_loss_weight);
  at::Tensor on_device(double loss) const;

  /// What more than one stage holds: the last of them owns it.
  struct Copied {
    at::Tensor owned, copy;  // here; undefined elsewhere
    int owner = 0, rank = 0;
  };
  std::vector<NamedTensor> list_weights(const config::TrainConfig& config);
  std::vector<NamedTensor> held_by(std::size_t model) const;
  std::vector<PipelineStage> stages();
  void copy_shared_weights();

  schedule::Schedule schedule_;
  std::shared_ptr<Communicator> ranks_;
  bool is_measured_;
  std::vector<models::LlamaPart> parts_;                            // of all stages
  std::vector<int> numbers_;                                        // of this rank's stages
  std::vector<std::shared_ptr<models::Llama>> models_;              // these
  std::vector<std::unique_ptr<FullyShardedDataParallel>> sharded_;  // as many, or none
  std::vector<NamedTensor> weights_, trained_;
  std::vector<Copied> copied_;
  std::vector<NamedTensor> copies_;
  bool copies_are_old_ = true;
  bool copies_change_ = false;  // they are trained
  // Of the batch that the stages run: by micro-batch, empty if each row is one document; of the micro-batch in
  // progress; and what divides the sum of its losses.
  std::vector<std::shared_ptr<const DocumentBoundaries>> micro_batch_documents_;
  std::shared_ptr<const DocumentBoundaries> documents_;
  std::vector<std::shared_ptr<const PreferenceBatch>> micro_batch_preferences_;  // likewise
  std::shared_ptr<const PreferenceBatch> preferences_now_;
  double divisor_ = 1, z_loss_now_ = 0;
  std::int64_t step_ = 0, first_row_ = 0, micro_batch_rows_ = 0;  // where the batch is in the run, for dropout
  std::optional<at::ScalarType> autocast_;
  std::shared_ptr<Communicator> replicas_;  // null: no stage is replicated
  std::vector<std::unique_ptr<DistributedDataParallel>> ddp_;
  std::unique_ptr<PipelineRuntime> runtime_, evaluation_;
};

}  // namespace phalanx::train
