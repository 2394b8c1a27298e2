#include "phalanx/kernels/clamped_swiglu.h"

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "phalanx/tensor/scale_in_place.h"

namespace phalanx::kernels {
namespace {

struct ClampedSwiglu : torch::autograd::Function<ClampedSwiglu> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up,
                            double limit) {
    ctx->save_for_backward({gate, up});
    ctx->saved_data["limit"] = limit;
    const at::Tensor g = gate.clamp_max(limit);
    at::Tensor y = (g * kSigmoidGain).sigmoid_().mul_(g);
    return y.mul_(up.clamp(-limit, limit).add_(1.0));
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &dy = grads[0];
    const double limit = ctx->saved_data["limit"].toDouble();
    const at::Tensor g = gate.clamp_max(limit), s = (g * kSigmoidGain).sigmoid_();
    // d(g s)/dg = s + 1.702 g s (1 - s). As in torch, a clamped value has a gradient at the limit itself.
    const at::Tensor rise = (1.0 - s).mul_(g);
    scale_in_place(rise, kSigmoidGain);
    const at::Tensor slope = s * (rise + 1.0);
    at::Tensor dgate = (up.clamp(-limit, limit).add_(1.0)).mul_(dy).mul_(slope);
    dgate.masked_fill_(gate > limit, 0.0);
    at::Tensor dup = (g * s).mul_(dy);
    dup.masked_fill_(up.abs() > limit, 0.0);
    return {dgate, dup, at::Tensor()};
  }
};

}  // namespace

at::Tensor clamped_swiglu(const at::Tensor& gate, const at::Tensor& up, double limit) {
  return ClampedSwiglu::apply(gate, up, limit);
}

}  // namespace phalanx::kernels
