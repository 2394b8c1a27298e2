#include "phalanx/verify/layout_side.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/config/model_config.h"
#include "phalanx/nn/init.h"
#include "phalanx/train/inputs/initial_weights.h"
#include "phalanx/train/model/float8_layers.h"
#include "phalanx/train/model/nf4_base.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/train/model/token_batch.h"
#include "phalanx/train/model/trained_model.h"
#include "phalanx/train/run_checkpoints.h"
#include "phalanx/verify/layout_check.h"

namespace phalanx::verify {

LayoutSide::LayoutSide(const config::TrainConfig& config, const std::shared_ptr<Communicator>& world, at::Device device)
    : plan(config::plan_run(config, world->size())),
      data(train::open_training_data(config, plan, device, world->rank())),
      model(train::make_parallel_model(config, plan, world, device)),
      options{.plan = plan,
              .rank = world->rank(),
              .device = device,
              .autocast = train::autocast_dtype(config, plan),
              .reference = data.reference} {  // zeros: both sides have the same
  if (!train::has_initial_weights(config) || config.lora.rank > 0) {
    model->initialise(static_cast<std::uint64_t>(config.debug.seed));
    if (!train::has_initial_weights(config)) train::initialise_nf4_base(config, *model);
  }
  if (train::has_initial_weights(config)) {
    train::load_initial_weights(config, model->with_expert_biases(model->weights()), [](const std::string&) {});
  }
  model->values_were_loaded();
  optimizer_step = std::make_unique<train::OptimizerStep>(config, model->parameters(), model->grad_norm_group(),
                                                          model->frozen(), model->mesh().world().get());
  optimizer_step->set_expert_load(model->expert_load());
}

void LayoutSide::compute_in(const config::TrainConfig& config, at::ScalarType dtype) {
  cast_ = train::build_model(config, config::model_config(config),
                             nn::TensorOptionsOfModule{.dtype = dtype, .device = options.device});
  train::apply_float8(*cast_, config, model->mesh(), options.device);
  options.autocast.reset();
  z_loss_weight_ = config.training.z_loss_weight;
}

void LayoutSide::observe_routing() {
  if (!model->expert_load()) return;
  std::vector<nn::Module*> models = model->modules();
  if (cast_) models.push_back(cast_.get());
  routing_ = std::make_unique<RoutingReplay>(models, rows().begin, plan.context_cut(options.rank));
}

std::vector<nn::Module*> LayoutSide::modules() const {
  return cast_ ? std::vector<nn::Module*>{cast_.get()} : model->modules();
}

double LayoutSide::forward_backward_in_cast(std::int64_t step) {
  std::map<std::string, at::Tensor> weights;
  for (const NamedTensor& p : model->weights()) weights[p.name] = p.tensor;
  const std::vector<NamedTensor> copies = nn::named_parameters(*cast_);
  {
    const at::NoGradGuard no_grad;
    for (const NamedTensor& copy : copies) copy.tensor.copy_(weights.at(copy.name));
  }
  const std::int64_t parts = plan.accumulation_steps;
  const auto divisor = static_cast<double>(data.dataloader->label_count(step));
  double loss_sum = 0;
  model->begin_step();
  model->prepare_experts(*cast_, *optimizer_step);
  for (std::int64_t part = 0; part < parts; ++part) {
    const data::RowRange rows = data.dataloader->rows_of({.micro_batch = part, .micro_batches = parts});
    const train::TokenBatch batch =
        train::load_batch(*data.dataloader, step, rows, options.device, {}, options.reference);
    std::optional<models::DocumentLoss> of_pairs;
    if (batch.preferences) of_pairs = model->preferences()->of(*batch.preferences);
    model->place_in_run(*cast_, step, rows.begin);
    const at::Tensor loss = cast_
                                ->loss(batch.inputs, batch.labels,
                                       {.documents = batch.documents,
                                        .divisor = divisor,
                                        .z_loss_weight = z_loss_weight_,
                                        .document_loss = of_pairs ? &*of_pairs : nullptr})
                                .to(at::kFloat);
    optimizer_step->scaled(loss).backward();
    loss_sum += loss.item<double>();
    for (const NamedTensor& copy : copies) {
      if (!copy.tensor.requires_grad()) continue;
      at::Tensor gradient = std::exchange(copy.tensor.mutable_grad(), at::Tensor()).to(at::kFloat);
      at::Tensor& sum = weights.at(copy.name).mutable_grad();
      sum = sum.defined() ? sum + gradient : std::move(gradient);
    }
  }
  return loss_sum;
}

double LayoutSide::forward_backward(std::int64_t step) {
  if (!routing_) return plain_forward_backward(step);
  routing_->begin_step(plan.cuts_by_work ? train::load_batch(*data.dataloader, step, rows(), at::kCPU).documents
                                         : nullptr);
  const double loss = plain_forward_backward(step);
  routing_->end_step();
  return loss;
}

double LayoutSide::plain_forward_backward(std::int64_t step) {
  if (cast_) return forward_backward_in_cast(step);
  return train::forward_backward_step(*model, *optimizer_step, *data.dataloader, options, step).loss.item<double>() *
         static_cast<double>(plan.parallel.loss_parts());
}

void LayoutSide::drop_gradients() {
  for (const NamedTensor& p : model->parameters()) p.tensor.mutable_grad().reset();
}

std::string LayoutSide::first_not_finite() const {
  for (const auto& [name, tensor, shard] : model->parameters()) {
    const at::Tensor& grad = tensor.grad();
    if (grad.defined() && !std::isfinite(grad.to(at::kDouble).norm().item<double>())) return name;
  }
  return "";
}

void LayoutSide::scale_loss(double factor) {
  TrainState state;
  optimizer_step->collect_state(state);
  for (const NamedTensor& one : state.tensors) {
    if (one.name.ends_with("loss_scaler.scale")) one.tensor.mul_(factor);
  }
}

LayoutSide::Rounding LayoutSide::rounding_of_gradients(std::int64_t step, double loss) {
  const auto parameters = model->parameters();
  std::vector<at::Tensor> rounded;
  for (const NamedTensor& p : parameters) rounded.push_back(std::exchange(p.tensor.mutable_grad(), at::Tensor()));
  const auto autocast = std::exchange(options.autocast, std::nullopt);
  const auto cast = std::exchange(cast_, nullptr);
  const double exact_loss = [&] {
    const train::WithoutFloat8 without(modules());
    return forward_backward(step);
  }();
  options.autocast = autocast;
  cast_ = cast;
  Rounding result;
  if (routing_) {
    for (const auto& [layer, difference] : routing_->differences()) {
      // A value that is not finite says nothing about rounding.
      result.routers[layer] = std::isfinite(difference.relative()) ? difference.relative() : 0;
    }
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& grad = parameters[i].tensor.mutable_grad();
    double norm = 0, off = 0;
    if (rounded[i].defined() && grad.defined()) {
      const at::Tensor exact = grad.to(at::kDouble);
      norm = exact.norm().item<double>();
      off = (rounded[i].to(at::kDouble) - exact).norm().item<double>();
    }
    grad = rounded[i];
    const bool is_measured = norm > 0 && std::isfinite(norm) && std::isfinite(off);
    result.gradients.push_back(is_measured ? off / norm : 0);
  }
  if (std::isfinite(exact_loss) && exact_loss != 0) result.loss = std::abs((loss - exact_loss) / exact_loss);
  return result;
}

config::TrainConfig reference_config(config::TrainConfig config, std::int64_t ranks) {
  const config::RunPlan plan = config::plan_run(config, ranks);
  // As many rows as in one product of the layout, so that sums over rows are rounded to 16 bits alike.
  if (config.parallelism.pipeline_parallel_degree > 1) {
    config.training.local_batch_size = config.parallelism.pipeline_parallel_microbatch_size;
  }
  // A forward pass of all data ranks is one of one rank, if each of them has one.
  try {
    config::require_equivalent_on_one_rank(config, plan);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("verify: {}", error.what()));
  }
  if (config::counts_load_over_data_ranks(config)) {
    config.training.local_batch_size *= plan.parallel.data_parallel_size();
  }
  config.parallelism = {};
  config.activation_checkpoint = {.mode = "none"};
  config.training.enable_cpu_offload = false;
  config.training.mixed_precision_reduce = "float32";
  config.validation.enable = false;
  return config;
}

data::RowRange LayoutSide::rows() const {
  return data.dataloader->rows_of(
      {.rank = plan.parallel.data_parallel_rank(options.rank), .ranks = plan.parallel.data_parallel_size()});
}

}  // namespace phalanx::verify
