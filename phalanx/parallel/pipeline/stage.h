// PipelineStage: what a pipeline runs as one of its stages, on the rank that holds it.
//
//   auto part = std::make_shared<models::Llama>(config, parts[1]);
//   PipelineStage middle = make_stage(1, part);                    // output = part(input)
//   PipelineStage last = make_loss_stage(1, part);                 // loss = part->loss(input, target)
//   PipelineStage other = make_stage(1, net, loss_of);             // loss = loss_of(net(input), target)
//
// One tensor goes in and one comes out, both with the micro-batch as dimension 0. The loss is a scalar, a mean over the
// micro-batch. Parameters keep their names in the whole model, so two stages must not use one name for different
// parameters. A name that appears on several stages means one parameter, of which each of these stages has a copy with
// the same values (tied embeddings).
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "phalanx/nn/module.h"
#include "phalanx/parallel/stage_sharding.h"

namespace phalanx {

struct PipelineStage {
  using Forward = std::function<at::Tensor(const at::Tensor& input)>;
  using Loss = std::function<at::Tensor(const at::Tensor& input, const at::Tensor& target)>;

  int index = 0;                              // of the stage, in the model's order
  std::shared_ptr<torch::nn::Module> module;  // its parameters are the stage's
  Forward forward;
  Loss loss;  // last stage only: from its input to the loss
  /// Called before each forward pass, for what the pass needs beside its input, such as document boundaries, and before
  /// each backward pass, in which checkpointed layers run forward again. Unset: nothing.
  std::function<void(int micro_batch)> begin_micro_batch = nullptr;
  std::shared_ptr<StageSharding> sharding = nullptr;  // FullyShardedDataParallel::in_pipeline()
};

template <std::derived_from<torch::nn::Module> M>
PipelineStage make_stage(int index, std::shared_ptr<M> module) {
  PipelineStage::Forward forward = [m = module.get()](const at::Tensor& x) -> at::Tensor {
    if constexpr (std::derived_from<M, nn::Module>) {
      return nn::call(*m, x);
    } else {
      return m->forward(x);
    }
  };
  return {.index = index, .module = std::move(module), .forward = std::move(forward), .loss = nullptr};
}

/// A last stage whose loss is loss_of(output, target).
template <std::derived_from<torch::nn::Module> M>
PipelineStage make_stage(
    int index, std::shared_ptr<M> module,
    std::type_identity_t<std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>> loss_of) {
  PipelineStage stage = make_stage(index, std::move(module));
  stage.loss = [forward = stage.forward, loss_of = std::move(loss_of)](const at::Tensor& x, const at::Tensor& target) {
    return loss_of(forward(x), target);
  };
  return stage;
}

/// A last stage whose module has its own loss(input, target).
template <std::derived_from<torch::nn::Module> M>
PipelineStage make_loss_stage(int index, std::shared_ptr<M> module) {
  PipelineStage stage = make_stage(index, module);
  stage.loss = [m = module.get()](const at::Tensor& x, const at::Tensor& target) { return m->loss(x, target); };
  return stage;
}

}  // namespace phalanx
