#include "phalanx/train/model/sharded_model.h"

#include <string>
#include <utility>

#include "phalanx/nn/init.h"
#include "phalanx/train/model/parallelize.h"
#include "phalanx/train/model/trained_model.h"

namespace phalanx::train {

ShardedModel::ShardedModel(const config::TrainConfig& config, const config::RunPlan& plan,
                           std::shared_ptr<Communicator> world, at::Device device)
    : ParallelModel(config, plan, std::move(world), device),
      reduces_each_microbatch_(config::reduces_each_microbatch(config)) {
  std::vector<std::string> names;  // before experts of other ranks are removed
  for (const NamedTensor& parameter : nn::named_parameters(*model_)) names.push_back(parameter.name);
  Parallelized parallelized = parallelize(*model_, config, plan, {mesh_, context_, experts_.get()}, device);
  sharded_ = std::move(parallelized.sharded);
  copy_groups_ = std::move(parallelized.copy_groups);
  weights_ = with_other_experts(sharded_->parameters(), names);
  trained_ = without(frozen(), weights_);
}

at::Tensor ShardedModel::forward_backward(const TokenBatch& batch, const ForwardBackwardPass& pass) {
  std::optional<FullyShardedDataParallel::NoAllReduce> rows_only;  // reduce-scattered in every pass
  std::optional<FullyShardedDataParallel::NoSync> local_only;
  if (!pass.is_last && reduces_each_microbatch_) rows_only.emplace(sharded_->no_all_reduce());
  if (!pass.is_last && !reduces_each_microbatch_) local_only.emplace(sharded_->no_sync());
  at::Tensor loss = run_whole_model(batch, pass, pass.is_last);
  if (experts_) give_empty_gradients(trained_);
  return loss;
}

}  // namespace phalanx::train
