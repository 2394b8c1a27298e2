#include "phalanx/train/validation.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "phalanx/base/error.h"
#include "phalanx/train/autocast_guard.h"
#include "phalanx/train/token_batch.h"

namespace phalanx::train {

Validator::Validator(data::DataLoader dataloader, ValidatorOptions options)
    : dataloader_(std::move(dataloader)), options_(options) {}

std::int64_t Validator::sample_count() const {
  if (options_.steps < 0) return dataloader_.sample_count();
  return std::min(dataloader_.sample_count(), options_.steps * options_.local_batch_size * options_.data_parallel_size);
}

std::optional<ValidationMetrics> Validator::run(ParallelModel& model, Communicator& world, std::int64_t step,
                                                const std::function<bool()>& is_cut_short) const {
  const auto begin = std::chrono::steady_clock::now();
  const at::NoGradGuard no_grad;
  const bool was_training = model.model().is_training();
  model.model().eval();

  const std::int64_t samples = sample_count();
  const std::int64_t round = options_.local_batch_size * options_.data_parallel_size;
  // [sum of losses, tokens that have one], in float64 on the device: nothing waits for it inside the loop.
  at::Tensor sums = at::zeros({2}, at::TensorOptions(at::kDouble).device(options_.device));
  for (std::int64_t first = 0; first < samples; first += round) {
    if (is_cut_short && is_cut_short()) {
      model.model().train(was_training);
      return std::nullopt;
    }
    const std::int64_t mine = first + options_.data_parallel_rank * options_.local_batch_size;
    const std::int64_t rows = std::min(options_.local_batch_size, samples - mine);
    if (rows <= 0) {
      // This rank has no samples left, but other ranks still need its part of the model.
      if (model.is_model_sharded()) model.loss_sum(load_samples(dataloader_, 0, 1, options_.device));
      continue;
    }
    const TokenBatch batch = load_samples(dataloader_, mine, rows, options_.device);
    const AutocastGuard autocast(options_.device.type(), options_.autocast);
    sums[0].add_(model.loss_sum(batch).to(at::kDouble));
    sums[1].add_(static_cast<double>(batch.label_count));
  }
  model.model().train(was_training);

  const at::Tensor host = sums.to(at::kCPU);
  // On the host, so that an error is thrown here and not by a later operation. Ranks that share a batch all count it
  // equally often.
  world.all_reduce(host);
  const auto* values = host.const_data_ptr<double>();
  if (values[1] == 0) {
    throw DataError(
        fmt::format("{}: none of the {} held-out sequences that are read has a trained token: expected "
                    "more of them ([validation] steps), or training.packing = \"best_fit\"",
                    dataloader_.tokens().path(), samples));
  }
  return ValidationMetrics{.step = step,
                           .loss = values[0] / values[1],
                           .tokens = samples * dataloader_.seq_len(),
                           .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
}

}  // namespace phalanx::train
