#include "phalanx/train/sharded_model.h"

#include "phalanx/train/parallelize.h"

namespace phalanx::train {

ShardedModel::ShardedModel(const config::TrainConfig& config, const config::RunPlan& plan,
                           std::shared_ptr<Communicator> world, at::Device device)
    : ParallelModel(config, plan, std::move(world), device),
      sharded_(parallelize(*model_, config, plan, mesh_, device).sharded),
      reduces_each_microbatch_(config::reduces_each_microbatch(config)) {}

at::Tensor ShardedModel::forward_backward(const TokenBatch& batch, const ForwardBackwardPass& pass) {
  std::optional<FullyShardedDataParallel::NoAllReduce> rows_only;  // reduce-scattered in every pass
  std::optional<FullyShardedDataParallel::NoSync> local_only;
  if (!pass.is_last && reduces_each_microbatch_) rows_only.emplace(sharded_->no_all_reduce());
  if (!pass.is_last && !reduces_each_microbatch_) local_only.emplace(sharded_->no_sync());
  return run_whole_model(batch, pass, pass.is_last);
}

}  // namespace phalanx::train
