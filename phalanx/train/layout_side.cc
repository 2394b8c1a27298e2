#include "phalanx/train/layout_side.h"

#include <ATen/TensorOperators.h>

#include <cmath>
#include <utility>

#include "phalanx/train/layout_check.h"
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

void LayoutSide::drop_gradients() {
  for (const NamedTensor& p : model.parameters()) p.tensor.mutable_grad().reset();
}

std::string LayoutSide::first_not_finite() const {
  for (const auto& [name, tensor, shard] : model.parameters()) {
    const at::Tensor& grad = tensor.grad();
    if (grad.defined() && !std::isfinite(grad.to(at::kDouble).norm().item<double>())) return name;
  }
  return "";
}

void LayoutSide::scale_loss(double factor) {
  TrainState state;
  update->collect_state(state);
  for (const NamedTensor& one : state.tensors) {
    if (one.name.ends_with("loss_scaler.scale")) one.tensor.mul_(factor);
  }
}

LayoutSide::Rounding LayoutSide::rounding_of_gradients(std::int64_t step, double loss) {
  const auto parameters = model.parameters();
  std::vector<at::Tensor> rounded;
  for (const NamedTensor& p : parameters) rounded.push_back(std::exchange(p.tensor.mutable_grad(), at::Tensor()));
  const auto autocast = std::exchange(options.autocast, std::nullopt);
  const double exact_loss = find_gradients(step);
  options.autocast = autocast;
  Rounding result;
  double all_squares = 0, off_squares = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& grad = parameters[i].tensor.mutable_grad();
    double norm = 0, off = 0;
    if (rounded[i].defined() && grad.defined()) {
      const at::Tensor exact = grad.to(at::kDouble);
      norm = exact.norm().item<double>();
      off = (rounded[i].to(at::kDouble) - exact).norm().item<double>();
    }
    grad = rounded[i];
    // What is not finite says nothing of rounding.
    const bool is_measured = norm > 0 && std::isfinite(norm) && std::isfinite(off);
    result.gradients.push_back(is_measured ? off / norm : 0);
    if (!is_measured) continue;
    all_squares += norm * norm;
    off_squares += off * off;
  }
  if (std::isfinite(exact_loss) && exact_loss != 0) result.loss = std::abs((loss - exact_loss) / exact_loss);
  result.norm = all_squares > 0 ? std::sqrt(off_squares / all_squares) : 0;
  return result;
}

TrainConfig reference_config(TrainConfig config) {
  // The rows that the layout has in one product, so that sums over rows are rounded to 16 bits alike.
  if (config.parallelism.pipeline_parallel_degree > 1) {
    config.training.local_batch_size = config.parallelism.pipeline_parallel_microbatch_size;
  }
  config.parallelism = {};
  config.activation_checkpoint = {.mode = "none"};
  config.training.enable_cpu_offload = false;
  config.training.mixed_precision_reduce = "float32";
  config.validation.enable = false;
  return config;
}

data::RowRange LayoutSide::rows() const {
  return data.batches->rows_of({.rank = plan.parallel.data_rank(options.rank), .ranks = plan.parallel.data_ranks()});
}

}  // namespace phalanx::train
