// ShardedModel: every data rank holds its rows of every parameter (FullyShardedDataParallel: ZeRO-1, -2 and -3).
#pragma once

#include <memory>
#include <vector>

#include "phalanx/train/model/parallel_model.h"

namespace phalanx::train {

class ShardedModel final : public ParallelModel {
 public:
  ShardedModel(const config::TrainConfig& config, const config::RunPlan& plan, std::shared_ptr<Communicator> world,
               at::Device device);

  void initialise(std::uint64_t seed) override { sharded_->initialise(seed); }
  void values_were_loaded() override { sharded_->invalidate_unsharded(); }
  at::Tensor forward_backward(const TokenBatch& batch, const ForwardBackwardPass& pass) override;
  at::Tensor loss_sum(const TokenBatch& batch) override { return loss_sum_of_whole_model(batch); }
  std::vector<nn::Module*> modules() const override { return {model_.get()}; }
  std::vector<NamedTensor> weights() const override { return weights_; }
  const std::vector<NamedTensor>& parameters() const override { return trained_; }

 private:
  std::vector<const FullyShardedDataParallel*> shardings() const override { return {sharded_.get()}; }

  std::unique_ptr<FullyShardedDataParallel> sharded_;
  std::vector<NamedTensor> weights_, trained_;
  const bool reduces_each_microbatch_;
};

}  // namespace phalanx::train
