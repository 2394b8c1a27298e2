// ReplicatedModel: every data rank holds the whole model, or its tensor-parallel part; DistributedDataParallel sums
// the gradients in the last backward pass of a step.
#pragma once

#include <memory>
#include <vector>

#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/train/model/parallel_model.h"

namespace phalanx::train {

class ReplicatedModel final : public ParallelModel {
 public:
  ReplicatedModel(const config::TrainConfig& config, const config::RunPlan& plan, std::shared_ptr<Communicator> world,
                  at::Device device);

  void initialise(std::uint64_t seed) override;
  void values_were_loaded() override;
  at::Tensor forward_backward(const TokenBatch& batch, const ForwardBackwardPass& pass) override;
  at::Tensor loss_sum(const TokenBatch& batch) override { return loss_sum_of_whole_model(batch); }
  std::vector<nn::Module*> modules() const override { return {model_.get()}; }
  std::vector<NamedTensor> weights() const override;
  const std::vector<NamedTensor>& parameters() const override { return ddp_->parameters(); }
  void collect_state(TrainState& state) const override;

 private:
  std::shared_ptr<Communicator> replicas_;
  std::unique_ptr<DistributedDataParallel> ddp_;  // null until values_were_loaded()
};

}  // namespace phalanx::train
