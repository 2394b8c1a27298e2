#include "phalanx/train/model/expert_load.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "phalanx/models/expert_bias.h"
#include "phalanx/nn/mixture_of_experts.h"

namespace phalanx::train {

std::unique_ptr<ExpertLoad> ExpertLoad::make(const config::TrainConfig& config, const ParallelPlan& plan,
                                             const models::LlamaConfig& model, std::shared_ptr<Communicator> world,
                                             at::Device device) {
  if (!model.has_experts()) return nullptr;
  std::unique_ptr<ExpertLoad> made(new ExpertLoad);
  made->counts_here_ = world->rank() % plan.tp == 0;
  made->world_ = std::move(world);
  made->all_ = at::zeros({model.n_layers, model.experts + 1}, at::TensorOptions(device).dtype(at::kLong));
  made->counts_ = made->all_.narrow(1, 0, model.experts);
  made->dropped_ = made->all_.select(1, model.experts);
  made->has_capacity_ = config.training.moe_expert_capacity_factor != 0;
  const bool moves = config.training.moe_router_enable_expert_bias;
  if (moves || model.has_expert_biases()) {
    made->biases_ = at::zeros({model.n_layers, model.experts}, at::TensorOptions(device).dtype(at::kFloat));
  }
  made->rate_ = moves ? config.training.moe_router_bias_update_rate : 0.0;
  made->first_layer_ = model.dense_layers;
  return made;
}

void ExpertLoad::attach(models::Llama& model, bool counts) const {
  for (const models::MixtureOfLayer& one : models::mixtures_of(model)) {
    nn::ExpertTensors tensors;
    if (biases_.defined()) tensors.bias = biases_[one.layer];
    if (counts && counts_here_) {
      tensors.counts = counts_[one.layer];
      tensors.dropped = dropped_[one.layer];
    }
    one.mixture->set_tensors(std::move(tensors));
  }
}

void ExpertLoad::begin_step() {
  all_.zero_();
  is_sum_ = false;
}

void ExpertLoad::sum() {
  if (std::exchange(is_sum_, true)) return;
  world_->all_reduce(all_).wait();
}

void ExpertLoad::end_step(const at::Tensor& stepped) {
  if (!biases_.defined() || rate_ == 0.0) return;
  const at::NoGradGuard no_grad;
  sum();
  // Whole numbers: counts times the number of experts, against the sum of the counts.
  const at::Tensor above = counts_ * counts_.size(1) - counts_.sum(1, /*keepdim=*/true);
  biases_.sub_(above.sign().to(at::kFloat) * (stepped.to(at::kFloat) * rate_));
}

std::vector<NamedTensor> ExpertLoad::named_biases() const {
  std::vector<NamedTensor> named;
  for (std::int64_t layer = first_layer_; biases_.defined() && layer < biases_.size(0); ++layer) {
    named.push_back({models::expert_bias_name(layer), biases_[layer]});
  }
  return named;
}

at::Tensor ExpertLoad::for_readback() const { return at::cat({counts_.flatten(), dropped_}).to(at::kDouble); }

ExpertLoadNumbers ExpertLoad::numbers_of(std::vector<double> read) const {
  ExpertLoadNumbers numbers;
  const auto end_of_counts = read.begin() + counts_.numel();
  const double all = std::accumulate(read.begin(), end_of_counts, 0.0);
  if (has_capacity_) numbers.dropped = std::accumulate(end_of_counts, read.end(), 0.0) / std::max(all, 1.0);
  const std::vector<double> counts(read.begin() + first_layer_ * counts_.size(1), end_of_counts);
  numbers.fullest = fullest_by_mean(counts, counts_.size(1));
  return numbers;
}

std::vector<double> fullest_by_mean(const std::vector<double>& counts, std::int64_t experts) {
  std::vector<double> result;
  for (auto row = counts.begin(); row != counts.end(); row += experts) {
    const double most = *std::max_element(row, row + experts), sum = std::accumulate(row, row + experts, 0.0);
    result.push_back(sum > 0 ? most * static_cast<double>(experts) / sum : 0);
  }
  return result;
}

}  // namespace phalanx::train
