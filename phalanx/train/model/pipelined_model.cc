#include "phalanx/train/model/pipelined_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "phalanx/nn/evaluation_mode.h"
#include "phalanx/nn/init.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/tensor/held_by_owner.h"
#include "phalanx/train/model/autocast_guard.h"
#include "phalanx/train/model/layer_costs.h"
#include "phalanx/train/model/parallelize.h"
#include "phalanx/train/model/precision.h"
#include "phalanx/train/model/trained_model.h"

namespace phalanx::train {
namespace {

/// One micro-batch through all stages, forward only.
schedule::Schedule forward_schedule(const schedule::Schedule& training) {
  schedule::Schedule forward{.name = "evaluation", .micro_batches = 1, .rank_of_stage = training.rank_of_stage};
  forward.actions.resize(training.actions.size());
  for (int rank = 0; rank < forward.ranks(); ++rank) {
    for (const int stage : forward.stages_of(rank)) {
      forward.actions[static_cast<std::size_t>(rank)].push_back(
          {.stage = stage, .kind = schedule::ActionKind::forward, .micro_batch = 0});
    }
  }
  return forward;
}

/// Records the passes of a step when it ends, normally or by an exception.
class PassSpans {
 public:
  PassSpans(observe::TraceRecorder* trace, const PipelineStatistics& statistics)
      : trace_(trace), statistics_(statistics) {}
  PassSpans(const PassSpans&) = delete;
  PassSpans& operator=(const PassSpans&) = delete;
  ~PassSpans() {
    if (trace_ == nullptr) return;
    const auto at = [&](double seconds) {
      return statistics_.began + std::chrono::duration_cast<observe::TraceRecorder::Clock::duration>(
                                     std::chrono::duration<double>(seconds));
    };
    for (const ExecutedPass& pass : statistics_.passes) {
      trace_->span(schedule::to_text(pass.action), "pass", at(pass.start), at(pass.end));
    }
  }

 private:
  observe::TraceRecorder* trace_;
  const PipelineStatistics& statistics_;
};

}  // namespace

PipelinedModel::PipelinedModel(const config::TrainConfig& config, const config::RunPlan& plan,
                               std::shared_ptr<Communicator> world, at::Device device)
    : ParallelModel(config, plan, std::move(world), device),
      schedule_(schedule::make_schedule(config::schedule_options(config, plan))),
      ranks_(mesh_.communicator("pp")),
      is_measured_(config.parallelism.pipeline_parallel_balance == "measured"),
      autocast_(autocast_dtype(config, plan)) {
  apply_tensor_parallelism(*model_, config, plan, mesh_, device);
  const models::LlamaConfig& shape = model_->config();
  parts_ = is_measured_ ? models::balance_llama(
                              shape, schedule_.stages(),
                              measure_layer_costs(config, shape, config.parallelism.pipeline_parallel_microbatch_size,
                                                  device, *world_))
                        : models::balance_llama(shape, schedule_.stages(), config.training.seq_len);
  numbers_ = schedule_.stages_of(mesh_.coordinate("pp"));
  for (const int stage : numbers_) {
    const auto part = build_model(config, shape, parts_[static_cast<std::size_t>(stage)],
                                  nn::TensorOptionsOfModule{.device = device, .without_memory = true});
    Parallelized parallelized = parallelize(*part, config, plan, {mesh_, context_, experts_.get()}, device);
    models_.push_back(part);
    if (parallelized.sharded) sharded_.push_back(std::move(parallelized.sharded));
    replicas_ = std::move(parallelized.replicas);
    copy_groups_.insert(copy_groups_.end(), parallelized.copy_groups.begin(), parallelized.copy_groups.end());
  }
  weights_ = list_weights(config);
  trained_ = without(frozen(), weights_);
  runtime_ = std::make_unique<PipelineRuntime>(ranks_, schedule_, stages(), PipelineOptions{.loss = PipelineLoss::sum});
}

std::vector<PipelineStage> PipelinedModel::stages() {
  std::vector<PipelineStage> stages;
  for (std::size_t i = 0; i < models_.size(); ++i) {
    const bool has_loss = models_[i]->part().head;
    models::Llama* const model = models_[i].get();
    stages.push_back(make_stage(numbers_[i], models_[i]));
    PipelineStage& stage = stages.back();
    stage.begin_micro_batch = [this, model](int micro_batch) {
      documents_ =
          micro_batch_documents_.empty() ? nullptr : micro_batch_documents_.at(static_cast<std::size_t>(micro_batch));
      preferences_now_ = micro_batch_preferences_.empty()
                             ? nullptr
                             : micro_batch_preferences_.at(static_cast<std::size_t>(micro_batch));
      place_in_run(*model, step_, first_row_ + micro_batch * micro_batch_rows_);
    };
    stage.forward = [this, model](const at::Tensor& input) { return nn::call(*model, input, documents_); };
    if (has_loss) {
      stage.loss = [this, model](const at::Tensor& input, const at::Tensor& target) {
        const auto of_pairs = document_loss(preferences_now_.get());
        return model->loss(input, target,
                           {.documents = documents_,
                            .divisor = divisor_,
                            .z_loss_weight = z_loss_now_,
                            .document_loss = of_pairs ? &*of_pairs : nullptr});
      };
    }
    if (!sharded_.empty()) stage.sharding = sharded_[i]->in_pipeline();
    if (!autocast_) continue;
    // Only around forward passes: the backward pass takes each operation's types from them.
    stage.forward = [this, run = std::move(stage.forward)](const at::Tensor& input) {
      const AutocastGuard autocast(device_.type(), autocast_);
      return run(input);
    };
    if (!has_loss) continue;
    stage.loss = [this, run = std::move(stage.loss)](const at::Tensor& input, const at::Tensor& target) {
      const AutocastGuard autocast(device_.type(), autocast_);
      return run(input, target);
    };
  }
  return stages;
}

std::vector<NamedTensor> PipelinedModel::held_by(std::size_t model) const {
  return sharded_.empty() ? nn::named_parameters(*models_[model]) : sharded_[model]->parameters();
}

std::vector<NamedTensor> PipelinedModel::list_weights(const config::TrainConfig& config) {
  std::map<std::string, std::vector<int>> stages_of;
  std::vector<std::vector<std::string>> names(static_cast<std::size_t>(schedule_.stages()));  // of each stage
  for (int stage = 0; stage < schedule_.stages(); ++stage) {
    const auto part = build_model(config, model_->config(), parts_[static_cast<std::size_t>(stage)],
                                  nn::TensorOptionsOfModule{.without_memory = true});
    for (const NamedTensor& parameter : nn::named_parameters(*part)) {
      stages_of[parameter.name].push_back(stage);
      names[static_cast<std::size_t>(stage)].push_back(parameter.name);
    }
  }
  const auto rank_of = [&](int stage) { return schedule_.rank_of_stage[static_cast<std::size_t>(stage)]; };

  std::map<std::pair<std::string, int>, NamedTensor> here;  // by stage
  std::vector<ShardSpec> mine;                              // of what this rank owns
  for (std::size_t i = 0; i < models_.size(); ++i) {
    for (const NamedTensor& held : with_other_experts(held_by(i), names[static_cast<std::size_t>(numbers_[i])])) {
      here[{held.name, numbers_[i]}] = held;
      if (stages_of.at(held.name).back() != numbers_[i]) continue;
      mine.push_back(held_by_owner(held, mesh_.shape(), "pp", ranks_->rank()));
    }
  }
  // The rows of a rank of another stage depend on the units of that stage.
  const std::map<std::string, ShardSpec> specs = specs_of_group(*ranks_, mine);

  std::vector<NamedTensor> weights;
  for (const auto& [name, tensor, shard] : nn::named_parameters(*model_)) {
    const std::vector<int>& stages = stages_of.at(name);
    const auto held = std::make_shared<Shard>(Shard{specs.at(name), mesh_.rank()});
    const auto owned = here.find({name, stages.back()});
    const bool is_here = owned != here.end();
    copies_change_ |= stages.size() > 1 && std::ranges::find(frozen(), name) == frozen().end();
    weights.push_back({name, is_here ? owned->second.tensor : at::empty(held->box().shape, tensor.options()), held});
    for (std::size_t i = 0; i + 1 < stages.size(); ++i) {
      const auto copy = here.find({name, stages[i]});
      if (copy != here.end()) copies_.push_back(copy->second);
      copied_.push_back({.owned = is_here ? owned->second.tensor : at::Tensor(),
                         .copy = copy != here.end() ? copy->second.tensor : at::Tensor(),
                         .owner = rank_of(stages.back()),
                         .rank = rank_of(stages[i])});
    }
  }
  return weights;
}

void PipelinedModel::initialise(std::uint64_t seed) {
  for (const auto& sharded : sharded_) sharded->initialise(seed);
  for (const auto& model : models_) {
    if (sharded_.empty()) nn::initialise(*model, seed);
  }
}

void PipelinedModel::values_were_loaded() {
  for (const auto& sharded : sharded_) sharded->invalidate_unsharded();
  copies_are_old_ = true;
  if (!replicas_ || !ddp_.empty()) return;
  for (const auto& model : models_) {
    const auto parameters = model->parameters();
    const bool is_trained = std::ranges::any_of(parameters, [](const at::Tensor& p) { return p.requires_grad(); });
    if (!is_trained) continue;  // a stage without gradients
    ddp_.push_back(std::make_unique<DistributedDataParallel>(*model, replicas_, ddp_options()));
  }
}

std::vector<nn::Module*> PipelinedModel::modules() const {
  std::vector<nn::Module*> modules;
  for (const auto& stage : models_) modules.push_back(stage.get());
  return modules;
}

std::vector<NamedTensor> PipelinedModel::replicated_weights() const {
  std::vector<NamedTensor> all = weights_;
  all.insert(all.end(), copies_.begin(), copies_.end());
  return all;
}

std::vector<const FullyShardedDataParallel*> PipelinedModel::shardings() const {
  std::vector<const FullyShardedDataParallel*> result;
  for (const auto& sharded : sharded_) result.push_back(sharded.get());
  return result;
}

// Copies of a parameter are a unit of their own on every stage, so both ranks have the same rows of it.
void PipelinedModel::copy_shared_weights() {
  if (!std::exchange(copies_are_old_, false)) return;
  const at::NoGradGuard no_grad;
  for (const Copied& one : copied_) {
    if (one.owned.defined() && one.copy.defined()) {
      one.copy.copy_(one.owned);
    } else if (one.owned.defined()) {
      ranks_->send(one.owned.detach().to(device_), one.rank);
    } else if (one.copy.defined()) {
      const at::Tensor values = at::empty_like(one.copy.detach(), at::TensorOptions(device_));
      ranks_->recv(values, one.owner);
      one.copy.copy_(values);
    }
  }
  if (copied_.empty()) return;
  for (const auto& sharded : sharded_) sharded->invalidate_unsharded();
}

at::Tensor PipelinedModel::on_device(double loss) const {
  return at::full({}, loss, at::TensorOptions(device_).dtype(at::kDouble));
}

at::Tensor PipelinedModel::forward_backward(const TokenBatch& batch, const ForwardBackwardPass& pass) {
  observe::TraceRecorder* const tracing = pass.profiler ? pass.profiler->recorder() : nullptr;
  const observe::TraceSpan span(tracing, "pipeline", "compute");
  return train(batch, pass, tracing);
}

void PipelinedModel::describe_batch(const TokenBatch& batch, std::int64_t micro_batches, double divisor,
                                    double z_loss_weight) {
  z_loss_now_ = z_loss_weight;
  divisor_ = divisor;
  micro_batch_rows_ = batch.labels.size(0) / micro_batches;
  micro_batch_documents_.clear();
  micro_batch_preferences_.clear();
  if (!batch.documents) return;
  const std::int64_t rows = batch.documents->rows() / micro_batches;
  for (std::int64_t i = 0; i < micro_batches; ++i) {
    micro_batch_documents_.push_back(batch.documents->narrow(i * rows, rows));
    if (batch.preferences) micro_batch_preferences_.push_back(batch.preferences->narrow(i * rows, rows));
  }
}

at::Tensor PipelinedModel::train(const TokenBatch& batch, const ForwardBackwardPass& pass,
                                 observe::TraceRecorder* trace) {
  const OptimizerStep& optimizer_step = pass.optimizer_step;
  copy_shared_weights();
  describe_batch(batch, schedule_.micro_batches, pass.divisor, z_loss_weight_);
  step_ = pass.step;
  first_row_ = pass.first_row;
  if (const at::Tensor scale = optimizer_step.loss_scale_on_device(); scale.defined()) {
    runtime_->scale_gradients(scale);
  } else {
    runtime_->scale_gradients(optimizer_step.loss_scale());
  }
  for (const auto& model : models_) prepare_experts(*model, optimizer_step);
  const PassSpans spans(trace, runtime_->statistics());
  at::Tensor loss = device_.is_cpu() ? on_device(runtime_->step(batch.inputs, batch.labels).loss())
                                     : runtime_->queue_step(batch.inputs, batch.labels);
  give_empty_gradients(trained_);
  // The optimizer does not step copies, so it does not reset their gradients.
  for (const Copied& one : copied_) {
    if (one.copy.defined()) one.copy.mutable_grad().reset();
  }
  copies_are_old_ = copies_change_;
  return loss;
}

at::Tensor PipelinedModel::loss_sum(const TokenBatch& batch) {
  copy_shared_weights();
  if (!evaluation_) evaluation_ = std::make_unique<PipelineRuntime>(ranks_, forward_schedule(schedule_), stages());
  describe_batch(batch, /*micro_batches=*/1, /*divisor=*/1, /*z_loss_weight=*/0);
  const nn::EvaluationMode evaluating(modules());
  return on_device(evaluation_->evaluate(batch.inputs, batch.labels).loss());
}

std::string PipelinedModel::pipeline_text() const {
  std::vector<double> layers;
  for (const models::LlamaPart& part : parts_) layers.push_back(static_cast<double>(part.end - part.begin) / 2.0);
  return fmt::format(
      "pipeline over {} ({}, {} stages{}, {} micro-batches)", schedule_.ranks(), schedule_.name, schedule_.stages(),
      is_measured_ ? fmt::format(" of {} layers as measured", fmt::join(layers, ", ")) : "", schedule_.micro_batches);
}

}  // namespace phalanx::train
