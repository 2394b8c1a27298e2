#include "phalanx/parallel/pipeline/stage_executor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/parallel/pipeline/graph_split.h"
#include "phalanx/tensor/counting_allocator.h"

namespace phalanx {
namespace {

// Whether some layer with parameters is not a Phalanx layer and no layer is checkpointed (only backward() supports
// checkpoints).
bool needs_the_graph(const torch::nn::Module& module) {
  bool has_foreign = false, has_checkpoint = false;
  const auto look = [&](const torch::nn::Module& one) {
    const auto* ours = dynamic_cast<const nn::Module*>(&one);
    if (ours == nullptr && !one.named_parameters(/*recurse=*/false).is_empty()) has_foreign = true;
    if (ours != nullptr && ours->has_runner()) has_checkpoint = true;
  };
  look(module);
  for (const auto& child : module.modules(/*include_self=*/false)) look(*child);
  return has_foreign && !has_checkpoint;
}

}  // namespace

struct StageExecutor::ForwardCache {
  at::Tensor input;            // a leaf that requires grad, except on the first stage
  torch::autograd::Edge root;  // of the output; without a function if nothing in it needs a gradient
  std::optional<GraphSplit> split;
};

StageExecutor::StageExecutor(PipelineStage stage, WeightSplit split)
    : stage_(std::move(stage)),
      by_graph_(split == WeightSplit::graph ||
                (split == WeightSplit::automatic && !stage_.sharding && needs_the_graph(*stage_.module))),
      queue_(std::make_shared<WeightGradientQueue>()) {
  for (const auto& parameter : stage_.module->parameters()) {
    if (parameter.requires_grad()) trained_.push_back(parameter);
  }
}

at::Tensor StageExecutor::forward(int micro_batch, const at::Tensor& input, const at::Tensor& target, bool trains) {
  const auto run = [&](const at::Tensor& x) {
    if (stage_.begin_micro_batch) stage_.begin_micro_batch(micro_batch);
    at::Tensor y = target.defined() ? stage_.loss(x, target) : stage_.forward(x);
    if (!y.defined()) throw Error("forward() returned no tensor");
    if (target.defined() && y.numel() != 1) {
      throw Error(fmt::format("the loss has the shape [{}]; expected a scalar", fmt::join(y.sizes(), ", ")));
    }
    return y;
  };
  if (!trains) {
    const at::NoGradGuard no_grad;
    return run(input);
  }
  const at::AutoGradMode record(true);
  auto cached = std::make_shared<ForwardCache>();
  cached->input = input.detach();
  if (stage_.index > 0 && input.is_floating_point()) cached->input.set_requires_grad(true);
  at::Tensor y;
  {
    const WeightGradientQueue::Scope scope(by_graph_ ? nullptr : queue_, {stage_.index, micro_batch});
    y = run(cached->input);
  }
  if (y.requires_grad()) {
    cached->root = torch::autograd::impl::gradient_edge(y);
    if (by_graph_) cached->split.emplace(y, cached->input, trained_);
  }
  PHALANX_ASSERT(!fwd_cache_.contains(micro_batch),
                 "a micro-batch passes a stage forward once before its backward pass");
  fwd_cache_[micro_batch] = std::move(cached);
  return y.detach();
}

at::Tensor StageExecutor::run_backward(ForwardCache& cached, const at::Tensor& output_gradient, bool deferring) {
  const at::NoGradGuard no_grad;
  if (cached.root.function) {
    queue_->set_deferring(deferring);
    const auto root = std::exchange(cached.root, {});
    torch::autograd::Engine::get_default_engine().execute({root}, {output_gradient}, /*keep_graph=*/false,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  return cached.input.grad();
}

// Counts gradients that autograd allocates itself, without a notification.
void StageExecutor::count_gradients() const {
  for (const at::Tensor& parameter : trained_) count_as(parameter.grad(), observe::MemoryCategory::gradients);
}

at::Tensor StageExecutor::backward(int micro_batch, const at::Tensor& output_gradient, bool defers_weights) {
  if (defers_weights) return backward_input(micro_batch, output_gradient);
  const auto cached = std::exchange(fwd_cache_.at(micro_batch), nullptr);
  PHALANX_ASSERT(cached != nullptr && cached->input.defined(), "backward runs once for a micro-batch");
  cached->split.reset();
  // What is checkpointed runs forward again.
  if (stage_.begin_micro_batch) stage_.begin_micro_batch(micro_batch);
  at::Tensor dx = run_backward(*cached, output_gradient, /*deferring=*/false);
  fwd_cache_.erase(micro_batch);
  count_gradients();
  if (!dx.defined() && cached->input.requires_grad()) dx = at::zeros_like(cached->input);
  return dx;
}

at::Tensor StageExecutor::backward_input(int micro_batch, const at::Tensor& output_gradient) {
  PHALANX_ASSERT(fwd_cache_.at(micro_batch) != nullptr && fwd_cache_.at(micro_batch)->input.defined(),
                 "backward_input runs once for a micro-batch");
  ForwardCache& cached = *fwd_cache_.at(micro_batch);
  if (stage_.begin_micro_batch) stage_.begin_micro_batch(micro_batch);
  at::Tensor dx;
  if (cached.split) {
    const at::NoGradGuard no_grad;
    cached.root = {};
    dx = cached.split->backward_input(output_gradient);
  } else {
    dx = run_backward(cached, output_gradient, /*deferring=*/true);
  }
  if (!dx.defined() && cached.input.requires_grad()) dx = at::zeros_like(cached.input);
  cached.input = at::Tensor();
  return dx.defined() ? dx.detach() : dx;
}

void StageExecutor::backward_weight(int micro_batch) {
  const auto cached = std::exchange(fwd_cache_.at(micro_batch), nullptr);
  PHALANX_ASSERT(cached != nullptr && !cached->input.defined(), "backward_weight follows backward_input");
  fwd_cache_.erase(micro_batch);
  if (cached->split) {
    const at::NoGradGuard no_grad;
    cached->split->backward_weight();
  } else {
    queue_->flush({stage_.index, micro_batch});
  }
  count_gradients();
}

void StageExecutor::clear_runtime_states() {
  for (const auto& [micro_batch, cached] : fwd_cache_) queue_->drop({stage_.index, micro_batch});
  fwd_cache_.clear();
}

}  // namespace phalanx
