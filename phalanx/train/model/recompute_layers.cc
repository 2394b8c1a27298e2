#include "phalanx/train/model/recompute_layers.h"

#include "phalanx/parallel/activation_checkpoint.h"

namespace phalanx::train {

void recompute_layers(models::Llama& model, const config::TrainConfig& config) {
  const std::int64_t every = config::recompute_every(config);
  const kernels::CheckpointPolicy keep =
      config::uses_op_sac(config) ? kernels::CheckpointPolicy(op_sac_policy) : nullptr;
  for (std::size_t i = 0; every > 0 && i < model.layers.size(); ++i) {
    const std::int64_t layer = model.part().begin / 2 + static_cast<std::int64_t>(i);
    if (layer % every == 0) checkpoint_activations(*model.layers[i], keep);
  }
}

}  // namespace phalanx::train
