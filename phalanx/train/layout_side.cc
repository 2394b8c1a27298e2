#include "phalanx/train/layout_side.h"

#include "phalanx/train/precision.h"
#include "phalanx/train/run_checkpoints.h"

namespace phalanx::train {

LayoutSide::LayoutSide(const TrainConfig& config, const std::shared_ptr<Communicator>& world, at::Device device)
    : plan(plan_run(config, world->size())),
      data(open_training_data(config, plan, device, world->rank())),
      model(config, plan, world, device),
      options{.plan = plan, .rank = world->rank(), .device = device, .autocast = autocast_dtype(config, plan)} {
  if (!has_initial_weights(config)) {
    model.initialise(static_cast<std::uint64_t>(config.debug.seed));
  } else {
    load_initial_weights(config, model.weights(), [](const std::string&) {});
  }
  model.values_were_loaded();
  update = std::make_unique<WeightUpdate>(config, model.parameters(), model.norm_ranks());
}

double LayoutSide::find_gradients(std::int64_t step) {
  return compute_gradients(model, *update, *data.batches, options, step).loss_sum.item<double>() /
         static_cast<double>(plan.accumulation_steps);
}

data::RowRange LayoutSide::rows() const {
  return data.batches->rows_of({.rank = plan.parallel.data_rank(options.rank), .ranks = plan.parallel.data_ranks()});
}

}  // namespace phalanx::train
