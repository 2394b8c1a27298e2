#include "phalanx/parallel/activation_checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/tensor/weight_gradient_queue.h"

namespace phalanx {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct CheckpointFrame : torch::CustomClassHolder {
  CheckpointFrame(std::function<at::Tensor(const at::Tensor&)> fn, const at::Tensor& input,
                  kernels::CheckpointPolicy policy)
      : fn(std::move(fn)),
        device(input.device().type()),
        autocast(kernels::autocast_state(device)),
        ref(WeightGradientQueue::current()) {
    if (policy) saved = std::make_unique<kernels::SavedActivations>(std::move(policy));
  }
  at::Tensor run(const at::Tensor& input, kernels::SavedActivations::Run which) const {
    // The autocast state around the layer, but without its cache: neither run leaves or uses a cached cast of a weight.
    // The second run's cast would still be there when the weight is updated, and the first run's has no gradient.
    const kernels::AutocastScope as_it_was(device, autocast);
    const kernels::SavedActivations::Scope scope(saved.get(), which);
    const WeightGradientQueue::Scope weights(ref);
    return fn(input);
  }
  std::function<at::Tensor(const at::Tensor&)> fn;
  at::DeviceType device;
  kernels::AutocastState autocast;
  std::unique_ptr<kernels::SavedActivations> saved;
  WeightGradientQueue::Ref ref;  // where the layer's weight gradients may be left, in any run
};

struct CheckpointFunction : torch::autograd::Function<CheckpointFunction> {
  // `anchor` needs a gradient, so that the function is recorded even if the input needs none.
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& /*anchor*/,
                            const c10::intrusive_ptr<CheckpointFrame>& frame) {
    ctx->save_for_backward({input});
    ctx->saved_data["recipe"] = c10::IValue::make_capsule(frame);
    ctx->saved_data["input_needs_grad"] = input.requires_grad();
    return frame->run(input.detach(), kernels::SavedActivations::Run::forward);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
    if (at::GradMode::is_enabled() || (asked_for != nullptr && !asked_for->empty())) {
      throw Error(
          "a checkpointed layer computes gradients by backward() alone; autograd::grad(), backward(inputs = ...) "
          "and create_graph do not work through it");
    }
    const auto found = ctx->saved_data.find("recipe");
    if (found == ctx->saved_data.end()) {
      throw Error("a second backward pass through a checkpointed layer; run it forward again instead");
    }
    const auto capsule = std::move(found->second).toCapsule();
    ctx->saved_data.erase(found);
    const auto& frame = static_cast<const CheckpointFrame&>(*capsule);
    const at::Tensor input =
        ctx->get_saved_variables()[0].detach().set_requires_grad(ctx->saved_data["input_needs_grad"].toBool());
    at::Tensor output;
    {
      const at::AutoGradMode record(true);
      output = frame.run(input, kernels::SavedActivations::Run::recompute);
    }
    if (output.requires_grad()) torch::autograd::backward({output}, {grads[0]});
    return {input.grad(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

bool op_sac_policy(kernels::SavedOp op, int nth) { return op == kernels::SavedOp::attention || nth % 2 == 0; }

at::Tensor checkpoint(std::function<at::Tensor(const at::Tensor&)> fn, const at::Tensor& input,
                      kernels::CheckpointPolicy policy) {
  if (!at::GradMode::is_enabled()) {
    // A layer around this one must not see what runs here, in this run or in the second.
    const kernels::SavedActivations::Scope none(nullptr, kernels::SavedActivations::Run::forward);
    return fn(input);
  }
  const at::Tensor anchor =
      at::empty({0}, at::TensorOptions(at::kFloat).device(input.device())).set_requires_grad(true);
  return CheckpointFunction::apply(input, anchor,
                                   c10::make_intrusive<CheckpointFrame>(std::move(fn), input, std::move(policy)));
}

void checkpoint_activations(nn::Module& module, const kernels::CheckpointPolicy& policy) {
  module.set_runner([policy](nn::Module::Forward forward, const at::Tensor& input) {
    return checkpoint(std::move(forward), input, policy);
  });
}

}  // namespace phalanx
