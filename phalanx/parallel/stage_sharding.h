// StageSharding: the interface through which a pipeline drives the sharded data parallelism of one of its stages.
//
//   FullyShardedDataParallel sharded(*part, mesh, options);
//   PipelineStage stage = make_stage(1, part);
//   stage.sharding = sharded.in_pipeline();
//
// In a step, a stage runs the passes of many micro-batches in an order that only the pipeline knows. A weight gradient
// may be computed long after the backward pass that it belongs to. So hooks on the passes, as used without a pipeline,
// are not enough: the pipeline has to announce each phase.
//
// The rank's own thread makes all calls. Within a step, all ranks that share the stage make the same calls in the same
// order.
#pragma once

namespace phalanx {

class StageSharding {
 public:
  virtual ~StageSharding() = default;

  /// From here on, unsharded gradients are accumulated. grad_ready of a parameter (tensor/grad_ready.h) fires once per
  /// step: when its gradient is that of the step.
  virtual void begin_step() = 0;
  /// Called before and after every run of autograd's engine.
  virtual void begin_backward() = 0;
  virtual void end_backward() = 0;
  /// Called after a micro-batch has produced its weight gradients.
  virtual void collect_gradients() = 0;
  /// Sets .grad() of every parameter whose grad_ready is still to come to its gradient so far, so that others can add
  /// to it.
  virtual void show_gradients() = 0;
  /// Waits for the averages and publishes them. Throws if a trained parameter got no gradient.
  virtual void end_step() = 0;
  /// Called in place of end_step() after an error: informs the ranks that share the stage.
  virtual void abandon_step() noexcept = 0;

  /// UNSHARD: starts to gather as many parameters as there is memory for.
  virtual void unshard() = 0;
  /// RESHARD: frees the gathered parameters, unless they stay until the step ends.
  virtual void reshard() = 0;
};

}  // namespace phalanx
