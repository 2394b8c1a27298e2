// StageSharding: what a pipeline tells the sharded data parallelism of one of its stages, and when.
//
//   FullyShardedDataParallel sharded(*part, mesh, options);
//   PipelineStage stage = make_stage(1, part);
//   stage.sharding = sharded.in_pipeline();
//
// In a step a stage runs the passes of many micro-batches in an order that only the pipeline knows, and the gradient of
// a weight may be computed long after the backward pass that it belongs to. So nothing can be told by the passes
// themselves, as without a pipeline. All calls are the rank's own thread's; those of a step are the same, in the same
// order, on every rank that shares the stage.
#pragma once

namespace phalanx {

class StageSharding {
 public:
  virtual ~StageSharding() = default;

  /// From here on gradients are added up, whole; grad_ready of a parameter (tensor/grad_ready.h) comes once, and says
  /// that its gradient is that of the step.
  virtual void begin_step() = 0;
  /// Around every run of autograd's engine.
  virtual void begin_backward() = 0;
  virtual void end_backward() = 0;
  /// After a micro-batch has brought its weight gradients.
  virtual void collect_gradients() = 0;
  /// .grad() of every parameter whose grad_ready is still to come becomes its gradient so far, for whoever adds to it.
  virtual void show_gradients() = 0;
  /// Waits for averages and hands them out. Throws where a trained parameter got no gradient.
  virtual void end_step() = 0;
  /// Instead, after an error: tells the ranks that share the stage.
  virtual void abandon_step() noexcept = 0;

  /// UNSHARD: starts to gather what there is memory for.
  virtual void unshard() = 0;
  /// RESHARD: lets go of it, unless it stays until the step ends.
  virtual void reshard() = 0;
};

}  // namespace phalanx
