#include "phalanx/train/model/replicated_model.h"

#include "phalanx/nn/init.h"
#include "phalanx/train/model/parallelize.h"

namespace phalanx::train {

ReplicatedModel::ReplicatedModel(const config::TrainConfig& config, const config::RunPlan& plan,
                                 std::shared_ptr<Communicator> world, at::Device device)
    : ParallelModel(config, plan, std::move(world), device) {
  Parallelized parallelized = parallelize(*model_, config, plan, {mesh_, context_}, device);
  replicas_ = std::move(parallelized.replicas);
  copy_groups_ = std::move(parallelized.copy_groups);
}

void ReplicatedModel::initialise(std::uint64_t seed) { nn::initialise(*model_, seed); }

void ReplicatedModel::values_were_loaded() {
  if (!ddp_) ddp_ = std::make_unique<DistributedDataParallel>(*model_, replicas_, ddp_options());
}

at::Tensor ReplicatedModel::forward_backward(const TokenBatch& batch, const ForwardBackwardPass& pass) {
  std::optional<DistributedDataParallel::NoSync> local_only;
  if (!pass.is_last) local_only.emplace(ddp_->no_sync());
  return run_whole_model(batch, pass, pass.is_last);
}

std::vector<NamedTensor> ReplicatedModel::weights() const { return nn::named_parameters(*model_); }

void ReplicatedModel::collect_state(TrainState& state) const {
  ParallelModel::collect_state(state);
  if (ddp_) ddp_->collect_state(state);
}

}  // namespace phalanx::train
