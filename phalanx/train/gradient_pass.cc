#include "phalanx/train/gradient_pass.h"

#include <ATen/ops/full.h>

#include <chrono>
#include <memory>

#include "phalanx/train/autocast_guard.h"
#include "phalanx/train/token_batch.h"

namespace phalanx::train {

using observe::TraceSpan;

GradientPass compute_gradients(ParallelModel& model, const WeightUpdate& update, const data::Batches& batches,
                               const GradientPassOptions& options, std::int64_t step) {
  const ParallelPlan& parallel = options.plan.parallel;
  const std::int64_t parts = options.plan.accumulation_steps;
  observe::TraceRecorder* const tracing = options.trace ? options.trace->recorder() : nullptr;
  const at::Tensor share = at::full({}, 1.0 / static_cast<double>(parts), at::TensorOptions(options.device));
  GradientPass pass;
  for (std::int64_t part = 0; part < parts; ++part) {
    TokenBatch batch;
    {
      const TraceSpan span(tracing, "data loading", "data");
      const auto begin = std::chrono::steady_clock::now();
      const auto rows = batches.rows_of({.rank = parallel.data_rank(options.rank),
                                         .ranks = parallel.data_ranks(),
                                         .micro_batch = part,
                                         .micro_batches = parts});
      batch = load_batch(batches, step, rows, options.device);
      pass.data_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }

    if (model.has_stages()) {
      const TraceSpan span(tracing, "pipeline", "compute");
      pass.loss_sum = model.train_pipeline(batch.inputs, batch.labels, update.loss_scale(), tracing);
      continue;
    }
    const std::shared_ptr<void> local_only = part + 1 < parts ? model.accumulate() : nullptr;
    at::Tensor loss;
    {
      const TraceSpan span(tracing, "forward", "compute");
      const AutocastGuard autocast(options.device.type(), options.autocast);
      loss = model.model().loss(batch.inputs, batch.labels);
    }
    {
      const TraceSpan span(tracing, "backward", "compute");
      update.scaled(loss).backward(share);
      if (tracing && !local_only) options.trace->backward_done();
    }
    const at::Tensor detached = loss.detach();
    pass.loss_sum = pass.loss_sum.defined() ? pass.loss_sum + detached : detached;
  }
  return pass;
}

}  // namespace phalanx::train
