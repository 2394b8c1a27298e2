#include "phalanx/train/model/preference_reference.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/train/model/autocast_guard.h"
#include "phalanx/train/model/token_batch.h"

namespace phalanx::train {

at::Tensor make_reference_table(const data::DataLoader& pairs) {
  return at::zeros({pairs.tokens().document_count() / 2, 2}, at::TensorOptions(at::kDouble));
}

void compute_reference(ParallelModel& model, Communicator& world, const data::DataLoader& pairs,
                       const at::Tensor& table, const ReferenceOptions& options) {
  const at::NoGradGuard no_grad;
  // Of each pair two likelihoods, and how many ranks have computed them: those that share the rows and have the output.
  const at::Tensor sums = at::zeros({table.size(0), 3}, table.options());
  auto* const sum = sums.mutable_data_ptr<double>();
  const std::int64_t samples = pairs.sample_count(), round = options.local_batch_size * options.data_parallel_size;
  for (std::int64_t first = 0; first < samples; first += round) {
    const std::int64_t mine = first + options.data_parallel_rank * options.local_batch_size;
    const std::int64_t rows = std::min(options.local_batch_size, samples - mine);
    // Without rows left, a rank still has a part of the model that the others need.
    if (rows <= 0 && !model.is_model_sharded()) continue;
    const TokenBatch batch = load_samples(pairs, rows > 0 ? mine : 0, rows > 0 ? rows : 1, options.device, options.cut);
    const at::Tensor found = model.preferences()->likelihoods_of([&] {
      const AutocastGuard autocast(options.device.type(), options.autocast);
      model.loss_sum(batch);
    });
    if (options.on_rows) options.on_rows(std::min(round, samples - first));
    if (rows <= 0 || !found.defined()) continue;
    const at::Tensor host = found.to(at::kCPU).contiguous();
    for (std::int64_t i = 0; i < batch.preferences->pairs(); ++i) {
      double* const of_pair = sum + 3 * batch.preferences->numbers[static_cast<std::size_t>(i)];
      of_pair[0] += host.const_data_ptr<double>()[2 * i];
      of_pair[1] += host.const_data_ptr<double>()[2 * i + 1];
      of_pair[2] += 1;
    }
  }
  world.all_reduce(sums);
  auto* const result = table.mutable_data_ptr<double>();
  for (std::int64_t pair = 0; pair < table.size(0); ++pair) {
    const double* const of_pair = sum + 3 * pair;
    for (std::int64_t i = 0; i < 2; ++i) {
      result[2 * pair + i] = of_pair[i] / of_pair[2];
      if (std::isfinite(result[2 * pair + i])) continue;
      throw Error(
          fmt::format("{}: the reference's log-likelihood of the {} answer of pair {} is {} ({} ranks have computed "
                      "it); expected a number: look at the initial weights",
                      pairs.tokens().path(), i == 0 ? "chosen" : "rejected", pair, result[2 * pair + i], of_pair[2]));
    }
  }
}

}  // namespace phalanx::train
