#include "phalanx/train/forward_backward_step.h"

#include <ATen/ops/full.h>

#include <chrono>
#include <memory>

#include "phalanx/train/autocast_guard.h"
#include "phalanx/train/token_batch.h"

namespace phalanx::train {

using observe::TraceSpan;

ForwardBackwardResult forward_backward_step(ParallelModel& model, const OptimizerStep& optimizer_step,
                                            const data::DataLoader& dataloader, const ForwardBackwardOptions& options,
                                            std::int64_t step) {
  const ParallelPlan& parallel = options.plan.parallel;
  const std::int64_t parts = options.plan.accumulation_steps;
  observe::TraceRecorder* const tracing = options.profiler ? options.profiler->recorder() : nullptr;
  const at::Tensor share = at::full({}, 1.0 / static_cast<double>(parts), at::TensorOptions(options.device));
  ForwardBackwardResult pass;
  for (std::int64_t part = 0; part < parts; ++part) {
    TokenBatch batch;
    {
      const TraceSpan span(tracing, "data loading", "data");
      const auto begin = std::chrono::steady_clock::now();
      const auto rows = dataloader.rows_of({.rank = parallel.data_parallel_rank(options.rank),
                                            .ranks = parallel.data_parallel_size(),
                                            .micro_batch = part,
                                            .micro_batches = parts});
      batch = load_batch(dataloader, step, rows, options.device);
      pass.data_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }

    if (model.has_stages()) {
      const TraceSpan span(tracing, "pipeline", "compute");
      pass.loss_sum = model.train_pipeline(batch.inputs, batch.labels, optimizer_step.loss_scale(), tracing);
      continue;
    }
    const std::shared_ptr<void> local_only = part + 1 < parts ? model.no_sync() : nullptr;
    at::Tensor loss;
    {
      const TraceSpan span(tracing, "forward", "compute");
      const AutocastGuard autocast(options.device.type(), options.autocast);
      loss = model.model().loss(batch.inputs, batch.labels);
    }
    {
      const TraceSpan span(tracing, "backward", "compute");
      optimizer_step.scaled(loss).backward(share);
      if (tracing && !local_only) options.profiler->backward_done();
    }
    const at::Tensor detached = loss.detach();
    pass.loss_sum = pass.loss_sum.defined() ? pass.loss_sum + detached : detached;
  }
  return pass;
}

}  // namespace phalanx::train
