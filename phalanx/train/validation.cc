#include "phalanx/train/validation.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/train/model/autocast_guard.h"
#include "phalanx/train/model/token_batch.h"

namespace phalanx::train {

Validator::Validator(std::vector<Set> sets, ValidatorOptions options)
    : sets_(std::move(sets)), options_(std::move(options)) {}

std::int64_t Validator::sample_count_of(const Set& set) const {
  const std::int64_t all = set.dataloader.sample_count();
  if (options_.steps < 0) return all;
  return std::min(all, options_.steps * options_.local_batch_size * options_.data_parallel_size);
}

std::int64_t Validator::sample_count() const {
  std::int64_t sum = 0;
  for (const Set& set : sets_) sum += sample_count_of(set);
  return sum;
}

std::optional<ValidationMetrics> Validator::run(ParallelModel& model, Communicator& world, std::int64_t step,
                                                const std::function<bool()>& is_cut_short) const {
  const auto begin = std::chrono::steady_clock::now();
  const at::NoGradGuard no_grad;
  const bool was_training = model.model().is_training();
  model.model().eval();

  PreferenceLoss* const preferences = model.preferences();
  if (preferences != nullptr) preferences->take_sums();
  const auto load = [&](const Set& set, std::int64_t first, std::int64_t rows) {
    return load_samples(set.dataloader, first, rows, options_.device, options_.cut, options_.reference);
  };
  const std::int64_t round = options_.local_batch_size * options_.data_parallel_size;
  // Of each set [sum of losses, tokens that have one], in float64 on the device: nothing waits for it inside the loop.
  at::Tensor sums = at::zeros({set_count(), 2}, at::TensorOptions(at::kDouble).device(options_.device));
  for (std::int64_t number = 0; number < set_count(); ++number) {
    const Set& set = sets_[static_cast<std::size_t>(number)];
    const at::Tensor of_set = sums[number];
    const std::int64_t samples = sample_count_of(set);
    for (std::int64_t first = 0; first < samples; first += round) {
      if (is_cut_short && is_cut_short()) {
        model.model().train(was_training);
        return std::nullopt;
      }
      const std::int64_t mine = first + options_.data_parallel_rank * options_.local_batch_size;
      const std::int64_t rows = std::min(options_.local_batch_size, samples - mine);
      if (rows <= 0) {
        // This rank has no samples left, but other ranks still need its part of the model.
        if (!model.is_model_sharded()) continue;
        const TokenBatch batch = load(set, 0, 1);
        // In the types of a pass that counts: the ranks gather the parts of one model.
        const AutocastGuard autocast(options_.device.type(), options_.autocast);
        const auto run = [&] { model.loss_sum(batch); };
        if (preferences == nullptr) {
          run();
        } else {
          preferences->likelihoods_of(run);  // its rewards do not count
        }
        continue;
      }
      const TokenBatch batch = load(set, mine, rows);
      const AutocastGuard autocast(options_.device.type(), options_.autocast);
      of_set[0].add_(model.loss_sum(batch).to(at::kDouble));
      of_set[1].add_(static_cast<double>(batch.label_count));
    }
  }
  model.model().train(was_training);

  const at::Tensor host = sums.to(at::kCPU);
  // On the host, so that an error is thrown here and not by a later operation. Ranks that share a batch all count it
  // equally often.
  world.all_reduce(host);
  const auto* values = host.const_data_ptr<double>();
  ValidationMetrics result{.step = step};
  double loss_sum = 0, label_count = 0;
  const std::int64_t ranks_of_a_part = world.size() / (options_.data_parallel_size * options_.cut.ranks);
  const auto copies = static_cast<double>(ranks_of_a_part);
  for (std::size_t i = 0; i < sets_.size(); ++i) {
    const double losses = values[2 * i], labels = values[2 * i + 1];
    const std::int64_t samples = sample_count_of(sets_[i]), tokens = samples * sets_[i].dataloader.seq_len();
    if (labels == 0) {
      throw DataError(
          fmt::format("{}: none of the {} held-out sequences that are read has a trained token: expected more of them "
                      "([validation] steps), or training.packing = \"best_fit\"",
                      sets_[i].dataloader.tokens().path(), samples));
    }
    loss_sum += losses;
    label_count += labels;
    result.tokens += tokens;
    if (sets_.size() > 1) {
      result.sets.push_back({.name = sets_[i].name,
                             .loss = losses / labels,
                             .tokens = tokens,
                             .labels = static_cast<std::int64_t>(labels / copies)});
    }
  }
  result.loss = loss_sum / label_count;
  if (preferences != nullptr) {
    const at::Tensor mine = preferences->take_sums();
    const at::Tensor all =
        mine.defined() ? mine.to(at::kCPU) : at::zeros({PreferenceLoss::kSums}, at::TensorOptions(at::kDouble));
    world.all_reduce(all);
    result.preferences = PreferenceLoss::metrics_of(all.const_data_ptr<double>());
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace phalanx::train
