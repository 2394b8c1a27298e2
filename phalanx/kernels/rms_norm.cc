#include "phalanx/kernels/rms_norm.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/fusible.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/kernels/row_kernels.h"

namespace phalanx::kernels {
namespace {

// The weight's gradient is summed per block of rows, then over the blocks in order: the same bits for any number of
// threads.
constexpr std::int64_t kNormBlock = 128;

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight,
                            double eps) {
    const at::Tensor x = x_in.contiguous();
    const std::int64_t dim = x.size(-1), rows = x.numel() / dim;
    at::Tensor y = at::empty_like(x), inverse_rms = at::empty({rows}, x.options());
    const float *in = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
    float *out = y.mutable_data_ptr<float>(), *inverse = inverse_rms.mutable_data_ptr<float>();
    at::parallel_for(0, rows, kNormBlock, [&](std::int64_t from, std::int64_t to) {
      row_kernels().rms_norm(to - from, dim, in + from * dim, w, static_cast<float>(eps), out + from * dim,
                             inverse + from);
    });
    ctx->save_for_backward({x, weight, inverse_rms});
    return y;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &inverse_rms = saved[2];
    const at::Tensor dy = grads[0].contiguous();
    const std::int64_t dim = x.size(-1), rows = x.numel() / dim, blocks = (rows + kNormBlock - 1) / kNormBlock;
    at::Tensor dx = at::empty_like(x), partial = at::zeros({blocks, dim}, x.options());
    const float *in = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>(),
                *inverse = inverse_rms.const_data_ptr<float>(), *dout = dy.const_data_ptr<float>();
    float *din = dx.mutable_data_ptr<float>(), *sums = partial.mutable_data_ptr<float>();
    at::parallel_for(0, blocks, 1, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t b = from; b < to; ++b) {
        const std::int64_t first = b * kNormBlock, count = std::min(kNormBlock, rows - first);
        row_kernels().rms_norm_backward(count, dim, in + first * dim, w, inverse + first, dout + first * dim,
                                        din + first * dim, sums + b * dim);
      }
    });
    at::Tensor dweight = at::zeros({dim}, x.options());
    for (std::int64_t b = 0; b < blocks; ++b) dweight.add_(partial[b]);
    return {dx, dweight, at::Tensor()};
  }
};

void gpu_rms_norm_backward(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& inverse_rms,
                           const at::Tensor& dy, const at::Tensor& dh, const at::Tensor& dx, const at::Tensor& dweight,
                           const at::Tensor& dx_copy = at::Tensor()) {
  require_no_graph("rms_norm");
  const std::int64_t dim = h.size(-1), rows = h.numel() / dim, blocks = gpu::rms_norm_backward_blocks(rows, dim);
  const at::Tensor partial = at::empty({blocks, dim}, inverse_rms.options());
  const auto launch = gpu_launch(h, weight, dy);
  launch->check(
      "rms_norm_backward",
      launch->kernels().rms_norm_backward(
          launch->stream(), rows, dim, gpu_type(h.scalar_type()), h.const_data_ptr(), gpu_type(weight.scalar_type()),
          weight.const_data_ptr(), inverse_rms.const_data_ptr<float>(), gpu_type(dy.scalar_type()), dy.const_data_ptr(),
          dh.defined() ? dh.const_data_ptr() : nullptr, dx.mutable_data_ptr(),
          gpu_type(dx_copy.defined() ? dx_copy.scalar_type() : at::kFloat),
          dx_copy.defined() ? dx_copy.mutable_data_ptr() : nullptr, partial.mutable_data_ptr<float>(), blocks));
  launch->check("rms_norm_backward",
                launch->kernels().column_sums(launch->stream(), blocks, dim, partial.const_data_ptr<float>(),
                                              gpu_type(dweight.scalar_type()), dweight.mutable_data_ptr()));
}

struct GpuRmsNormFunction : torch::autograd::Function<GpuRmsNormFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight,
                            double eps, at::ScalarType type) {
    const at::Tensor x = x_in.contiguous();
    const std::int64_t dim = x.size(-1), rows = x.numel() / dim;
    at::Tensor y = at::empty_like(x, type);
    const at::Tensor inverse_rms = at::empty({rows}, x.options().dtype(at::kFloat));
    const auto launch = gpu_launch(x, weight);
    launch->check("rms_norm", launch->kernels().rms_norm(
                                  launch->stream(), rows, dim, gpu_type(x.scalar_type()), x.const_data_ptr(),
                                  gpu_type(weight.scalar_type()), weight.const_data_ptr(), static_cast<float>(eps),
                                  gpu_type(type), y.mutable_data_ptr(), inverse_rms.mutable_data_ptr<float>()));
    ctx->save_for_backward({x, weight, inverse_rms});
    return y;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor dx = at::empty_like(saved[0]), dweight = at::empty_like(saved[1]);
    gpu_rms_norm_backward(saved[0], saved[1], saved[2], grads[0].contiguous(), at::Tensor(), dx, dweight);
    return {dx, dweight, at::Tensor(), at::Tensor()};
  }
};

struct GpuAddRmsNormFunction : torch::autograd::Function<GpuAddRmsNormFunction> {
  static torch::autograd::tensor_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in,
                                              const at::Tensor& delta_in, const at::Tensor& weight, double eps,
                                              at::ScalarType type) {
    const at::Tensor x = x_in.contiguous(), delta = delta_in.contiguous();
    const std::int64_t dim = x.size(-1), rows = x.numel() / dim;
    const at::Tensor h = at::empty_like(x), y = at::empty_like(x, type);
    const at::Tensor inverse_rms = at::empty({rows}, x.options().dtype(at::kFloat));
    const auto launch = gpu_launch(x, delta, weight);
    launch->check("add_rms_norm", launch->kernels().add_rms_norm(
                                      launch->stream(), rows, dim, gpu_type(x.scalar_type()), x.const_data_ptr(),
                                      gpu_type(delta.scalar_type()), delta.const_data_ptr(), h.mutable_data_ptr(),
                                      gpu_type(weight.scalar_type()), weight.const_data_ptr(), static_cast<float>(eps),
                                      gpu_type(type), y.mutable_data_ptr(), inverse_rms.mutable_data_ptr<float>()));
    ctx->save_for_backward({h, weight, inverse_rms});
    ctx->saved_data["delta_type"] = static_cast<std::int64_t>(delta.scalar_type());
    return {h, y};
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor dx = at::empty_like(saved[0]), dweight = at::empty_like(saved[1]);
    // delta's gradient, in its own type: written with dx where that saves a pass over dx.
    const auto kept = ctx->saved_data.find("delta_type");
    const bool differs = kept != ctx->saved_data.end() && dx.scalar_type() == at::kFloat &&
                         kept->second.toInt() != static_cast<std::int64_t>(at::kFloat);
    const at::Tensor ddelta =
        differs ? at::empty_like(dx, static_cast<at::ScalarType>(kept->second.toInt())) : at::Tensor();
    gpu_rms_norm_backward(saved[0], saved[1], saved[2], grads[1].contiguous(), grads[0].contiguous(), dx, dweight,
                          ddelta);
    return {dx, differs ? ddelta : dx, dweight, at::Tensor(), at::Tensor()};
  }
};

struct GpuAddFunction : torch::autograd::Function<GpuAddFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& delta_in) {
    const at::Tensor x = x_in.contiguous(), delta = delta_in.contiguous();
    at::Tensor h = at::empty_like(x);
    const auto launch = gpu_launch(x, delta);
    launch->check("add",
                  launch->kernels().add(launch->stream(), x.numel(), gpu_type(x.scalar_type()), x.const_data_ptr(),
                                        gpu_type(delta.scalar_type()), delta.const_data_ptr(), h.mutable_data_ptr()));
    ctx->saved_data["delta_type"] = static_cast<std::int64_t>(delta.scalar_type());
    return h;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto type = static_cast<at::ScalarType>(ctx->saved_data["delta_type"].toInt());
    return {grads[0], grads[0].to(type)};
  }
};

// h is x itself: only the backward pass is fused.
struct GpuResidualNormFunction : torch::autograd::Function<GpuResidualNormFunction> {
  static torch::autograd::tensor_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                                              const at::Tensor& weight, double eps, at::ScalarType type) {
    return {x, GpuRmsNormFunction::forward(ctx, x, weight, eps, type)};
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    auto of_sum = GpuAddRmsNormFunction::backward(ctx, grads);
    return {of_sum[0], of_sum[2], at::Tensor(), at::Tensor()};
  }
};

// What the consumers, which are products, would cast it to under autocast.
at::ScalarType type_of_normalised(const at::Tensor& x, const at::Tensor& weight) {
  const AutocastState autocast = autocast_state(x.device().type());
  return autocast.enabled ? autocast.dtype : at::promote_types(x.scalar_type(), weight.scalar_type());
}

/// Whether one kernel makes x + delta, in x's type.
bool can_add_on_gpu(const at::Tensor& x, const at::Tensor& delta) {
  return delta.sizes() == x.sizes() && at::promote_types(x.scalar_type(), delta.scalar_type()) == x.scalar_type() &&
         gpu_launch(x, delta);
}

bool can_use_gpu_kernel(const at::Tensor& x, const at::Tensor& weight, at::ScalarType type) {
  return gpu_kernels_on(x.device().type()) != nullptr && gpu_launch(x, weight) && x.numel() > 0 &&
         weight.is_contiguous() && weight.numel() == x.size(-1) &&
         (x.scalar_type() == type || x.scalar_type() == at::kFloat || type == at::kFloat);
}

}  // namespace

at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor h = x.to(at::kFloat);
  return (h * (h * h).mean(-1, /*keepdim=*/true).add(eps).rsqrt()).to(x.scalar_type()) * weight;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (const at::ScalarType type = type_of_normalised(x, weight); can_use_gpu_kernel(x, weight, type)) {
    return GpuRmsNormFunction::apply(x, weight, eps, type);
  }
  if (!fusible(x, weight) || !weight.is_contiguous()) return rms_norm_reference(x, weight, eps);
  return RmsNormFunction::apply(x, weight, eps);
}

ResidualNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps) {
  const at::ScalarType type = type_of_normalised(x, weight);
  if (can_use_gpu_kernel(x, weight, type)) {
    if (!delta.defined()) {
      const auto made = GpuResidualNormFunction::apply(x, weight, eps, type);
      return {made[0], made[1]};
    }
    if (can_add_on_gpu(x, delta)) {
      const auto made = GpuAddRmsNormFunction::apply(x, delta, weight, eps, type);
      return {made[0], made[1]};
    }
  }
  const at::Tensor h = delta.defined() ? x + delta : x;
  return {h, rms_norm(h, weight, eps)};
}

at::Tensor add_delta(const at::Tensor& x, const at::Tensor& delta) {
  // ATen's own kernel is as fast where the types are the same.
  const bool fused = x.scalar_type() != delta.scalar_type() && x.numel() > 0 && can_add_on_gpu(x, delta);
  return fused ? GpuAddFunction::apply(x, delta) : x + delta;
}

}  // namespace phalanx::kernels
