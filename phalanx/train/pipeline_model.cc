#include "phalanx/train/pipeline_model.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "phalanx/models/llama_parallel.h"
#include "phalanx/nn/init.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/train/recompute_layers.h"

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

}  // namespace

PipelineModel::PipelineModel(const TrainConfig& config, const RunPlan& plan, const DeviceMesh& mesh, at::Device device,
                             const models::Llama& whole)
    : schedule_(schedule::make_schedule(schedule_options(config, plan))),
      ranks_(mesh.communicator("pp")),
      parts_(models::balance_llama(whole.config(), schedule_.stages(), config.training.seq_len)),
      numbers_(schedule_.stages_of(mesh.coordinate("pp"))) {
  for (const int stage : numbers_) {
    const auto part =
        std::make_shared<models::Llama>(whole.config(), parts_[static_cast<std::size_t>(stage)],
                                        nn::TensorOptionsOfModule{.device = device, .without_memory = true});
    recompute_layers(*part, config);
    if (plan.parallel.tp > 1) {
      models::parallelize_llama(
          *part, mesh, {.sequence_parallel = plan.parallel.sequence_parallel, .seq_len = config.training.seq_len});
    }
    nn::give_memory(*part);
    models_.push_back(part);
  }
  weights_ = list_weights(whole, mesh);
  runtime_ = std::make_unique<PipelineRuntime>(ranks_, schedule_, stages());
}

std::vector<PipelineStage> PipelineModel::stages() const {
  std::vector<PipelineStage> stages;
  for (std::size_t i = 0; i < models_.size(); ++i) {
    const bool has_loss = models_[i]->part().head;
    stages.push_back(has_loss ? make_loss_stage(numbers_[i], models_[i]) : make_stage(numbers_[i], models_[i]));
  }
  return stages;
}

std::vector<NamedTensor> PipelineModel::list_weights(const models::Llama& whole, const DeviceMesh& mesh) const {
  std::map<std::string, int> rank_of;  // in the pipeline
  for (int stage = 0; stage < schedule_.stages(); ++stage) {
    const models::Llama part(whole.config(), parts_[static_cast<std::size_t>(stage)],
                             nn::TensorOptionsOfModule{.without_memory = true});
    for (const NamedTensor& parameter : nn::named_parameters(part)) {
      rank_of[parameter.name] = schedule_.rank_of_stage[static_cast<std::size_t>(stage)];
    }
  }
  std::map<std::string, at::Tensor> here;
  for (const auto& model : models_) {
    for (const NamedTensor& parameter : nn::named_parameters(*model)) here[parameter.name] = parameter.tensor;
  }
  std::vector<NamedTensor> weights;
  for (const auto& [name, tensor, shard] : nn::named_parameters(whole)) {
    // Over the stages first: all rows are one rank's; then as tensor parallelism cuts them.
    const std::vector<std::int64_t> shape = shard ? shard->spec.shape() : tensor.sizes().vec();
    Split of_stages{
        .axis = "pp", .dim = 0, .sizes = std::vector<std::int64_t>(static_cast<std::size_t>(ranks_->size()))};
    of_stages.sizes[static_cast<std::size_t>(rank_of.at(name))] = shape[0];
    Placement placement{.splits = {of_stages}};
    if (shard) {
      const auto& cut = shard->spec.placement().splits;
      placement.splits.insert(placement.splits.end(), cut.begin(), cut.end());
    }
    const auto held =
        shard ? std::make_shared<Shard>(shard->spec.with(placement), shard->rank)
              : std::make_shared<Shard>(ShardSpec(name, shape, DataType::f32, mesh.shape(), placement), mesh.rank());
    const auto mine = here.find(name);
    weights.push_back({name, mine != here.end() ? mine->second : at::empty(held->box().shape, tensor.options()), held});
  }
  return weights;
}

void PipelineModel::initialise(std::uint64_t seed) {
  for (const auto& model : models_) nn::initialise(*model, seed);
}

void PipelineModel::average_over(const std::shared_ptr<Communicator>& replicas) {
  for (const auto& model : models_) ddp_.push_back(std::make_unique<DistributedDataParallel>(*model, replicas));
}

double PipelineModel::train(const at::Tensor& inputs, const at::Tensor& labels) {
  const double loss = runtime_->step(inputs, labels).loss();
  // What other stages hold is stepped, too: of nothing.
  for (const auto& [name, tensor, shard] : weights_) {
    if (tensor.numel() == 0) tensor.mutable_grad() = at::empty_like(tensor);
  }
  return loss;
}

double PipelineModel::evaluate(const at::Tensor& inputs, const at::Tensor& labels) {
  if (!evaluation_) evaluation_ = std::make_unique<PipelineRuntime>(ranks_, forward_schedule(schedule_), stages());
  return evaluation_->evaluate(inputs, labels).loss();
}

std::string PipelineModel::text() const {
  return fmt::format("pipeline over {} ({}, {} stages, {} micro-batches)", schedule_.ranks(), schedule_.name,
                     schedule_.stages(), schedule_.micro_batches);
}

}  // namespace phalanx::train
