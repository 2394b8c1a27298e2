// StageExecutor: one stage's passes over its micro-batches, on tensors alone: it knows nothing of ranks and schedules.
//
// Between F and the end of B, or of W, it keeps the micro-batch's graph by its root alone: an output that has been sent
// is let go of. I and W are two halves of B: for modules whose layers are ours by the queue of weight gradients
// (tensor/weight_gradient_queue.h), for others by a walk over the graph (graph_split.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "phalanx/parallel/pipeline/stage.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx {

enum class WeightSplit {
  automatic,  // by the queue where every parameter belongs to a layer of ours, or where layers are checkpointed, or the
              // stage is sharded
  queue,      // layers of ours defer their weight gradients; what others have is computed in I
  graph,      // any layer, for a walk over the graph and more runs of the engine
};

class StageExecutor {
 public:
  StageExecutor(PipelineStage stage, WeightSplit split);

  int index() const noexcept { return stage_.index; }
  const PipelineStage& stage() const noexcept { return stage_; }

  /// The output, or with a target the loss, without a graph: that stays here if `trains`.
  at::Tensor forward(int micro_batch, const at::Tensor& input, const at::Tensor& target, bool trains);

  /// B and I return the gradient of the input, undefined where it needs none. `output_gradient` is of the output or of
  /// the loss. With `defers_weights` B ends with W's work undone: the caller runs backward_weight().
  at::Tensor backward(int micro_batch, const at::Tensor& output_gradient, bool defers_weights);
  at::Tensor backward_input(int micro_batch, const at::Tensor& output_gradient);
  void backward_weight(int micro_batch);

  /// Micro-batches between F and the end of B or W.
  int live() const noexcept { return static_cast<int>(fwd_cache_.size()); }
  void clear_runtime_states();

 private:
  struct ForwardCache;
  void count_gradients() const;
  at::Tensor run_backward(ForwardCache& cached, const at::Tensor& output_gradient, bool deferring);

  PipelineStage stage_;
  bool by_graph_;
  std::shared_ptr<WeightGradientQueue> queue_;
  std::vector<at::Tensor> trained_;
  std::map<int, std::shared_ptr<ForwardCache>> fwd_cache_;
};

}  // namespace phalanx
