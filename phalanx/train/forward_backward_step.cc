#include "phalanx/train/forward_backward_step.h"

#include <fmt/format.h>

#include <chrono>

#include "phalanx/base/error.h"
#include "phalanx/train/model/token_batch.h"

namespace phalanx::train {

using observe::TraceSpan;

namespace {

bool has_mask(const data::BatchSource& source) {
  bool any = false;
  source.each_file([&](const std::string&, const data::DataLoader& file) { any |= !file.tokens().mask().empty(); });
  return any;
}

}  // namespace

ForwardBackwardResult forward_backward_step(ParallelModel& model, const OptimizerStep& optimizer_step,
                                            const data::BatchSource& dataloader, const ForwardBackwardOptions& options,
                                            std::int64_t step) {
  const ParallelPlan& parallel = options.plan.parallel;
  const std::int64_t parts = options.plan.accumulation_steps;
  observe::TraceRecorder* const tracing = options.profiler ? options.profiler->recorder() : nullptr;
  ForwardBackwardResult pass;
  const auto begin_of_step = std::chrono::steady_clock::now();
  pass.global_label_count = dataloader.label_count(step);
  pass.data_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_of_step).count();
  if (pass.global_label_count == 0) {
    throw DataError(
        fmt::format("step {}: no token of the global batch has a label: its {} sequences hold {}; expected a larger "
                    "batch, or training.packing = \"best_fit\"",
                    step + 1, dataloader.global_batch_size(),
                    has_mask(dataloader) ? "no trained token" : "documents of single tokens alone"));
  }
  model.begin_step();
  for (std::int64_t part = 0; part < parts; ++part) {
    TokenBatch batch;
    std::int64_t first_row = 0;
    {
      const TraceSpan span(tracing, "data loading", "data");
      const auto begin = std::chrono::steady_clock::now();
      const auto rows = dataloader.rows_of({.rank = parallel.data_parallel_rank(options.rank),
                                            .ranks = parallel.data_parallel_size(),
                                            .micro_batch = part,
                                            .micro_batches = parts});
      batch =
          load_batch(dataloader, step, rows, options.device, options.plan.context_cut(options.rank), options.reference);
      first_row = rows.begin;
      pass.data_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }

    const at::Tensor loss = model.forward_backward(batch, {.optimizer_step = optimizer_step,
                                                           .divisor = static_cast<double>(pass.global_label_count),
                                                           .step = step,
                                                           .first_row = first_row,
                                                           .is_last = part + 1 == parts,
                                                           .autocast = options.autocast,
                                                           .profiler = options.profiler});
    pass.loss = pass.loss.defined() ? pass.loss + loss : loss;
    pass.label_count += batch.label_count;
    const auto seq = static_cast<double>(batch.inputs.size(1));
    // Ranks that share these rows share the work on them.
    pass.pairs += (batch.documents ? batch.documents->pairs() : static_cast<double>(batch.inputs.size(0)) * seq * seq) /
                  static_cast<double>(parallel.cp);
  }
  if (PreferenceLoss* const preferences = model.preferences()) pass.preference_sums = preferences->take_sums();
  return pass;
}

}  // namespace phalanx::train
