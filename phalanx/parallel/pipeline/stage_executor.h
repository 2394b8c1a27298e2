// StageExecutor: runs one stage's passes over its micro-batches. It works on tensors only and knows neither ranks nor
// schedules.
//
// Between F (forward) and the end of B (backward) or W (backward_weight), it keeps a micro-batch's graph only by its
// root. An output that has been sent is freed. backward_input (I) and backward_weight (W) together make B. For modules
// that consist of Phalanx layers, the split uses the queue of weight gradients (tensor/weight_gradient_queue.h). For
// others, it walks the graph (graph_split.h).
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
  automatic,  // queue if every parameter belongs to a Phalanx layer, if layers are checkpointed, or if the
              // stage is sharded
  queue,      // Phalanx layers defer their weight gradients; those of other layers are computed in I
  graph,      // works with any layer; costs a walk over the graph and more runs of the engine
};

class StageExecutor {
 public:
  StageExecutor(PipelineStage stage, WeightSplit split);

  int index() const noexcept { return stage_.index; }
  const PipelineStage& stage() const noexcept { return stage_; }

  /// Returns the output or, with a target, the loss. The result has no graph. If `trains`, the graph stays here.
  at::Tensor forward(int micro_batch, const at::Tensor& input, const at::Tensor& target, bool trains);

  /// backward() and backward_input() return the gradient of the input, undefined if it needs none. `output_gradient` is
  /// the gradient of the output or of the loss. With `defers_weights`, backward() leaves the weight gradients undone,
  /// and the caller must run backward_weight().
  at::Tensor backward(int micro_batch, const at::Tensor& output_gradient, bool defers_weights);
  at::Tensor backward_input(int micro_batch, const at::Tensor& output_gradient);
  void backward_weight(int micro_batch);

  /// Micro-batches between forward and the end of backward or backward_weight.
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
