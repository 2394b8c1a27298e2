#include "phalanx/kernels/rotary.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

#include "phalanx/kernels/fusible.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/kernels/row_kernels.h"

namespace phalanx::kernels {
namespace {

/// x [batch, heads, seq, head_dim] rotated by the tables. Its memory layout is [batch, seq, heads, head_dim], as the
/// projections before and the attention after it need it.
at::Tensor rotated(const at::Tensor& x_in, const at::Tensor& cos, const at::Tensor& sin, float sin_sign) {
  const at::Tensor x = x_in.stride(-1) == 1 ? x_in : x_in.contiguous();
  const std::int64_t batch = x.size(0), heads = x.size(1), seq = x.size(2), head_dim = x.size(3), half = head_dim / 2;
  const at::Tensor y = at::empty({batch, seq, heads, head_dim}, x.options());
  const float *in = x.const_data_ptr<float>(), *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  const bool per_row = cos.dim() == 3;
  at::parallel_for(0, batch * seq, 64, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t t = from; t < to; ++t) {
      const std::int64_t b = t / seq, position = t % seq, angle = (per_row ? t : position) * half;
      row_kernels().rotate(heads, half, c + angle, s + angle, sin_sign, in + b * x.stride(0) + position * x.stride(2),
                           x.stride(1), out + t * heads * head_dim, head_dim);
    }
  });
  return y.transpose(1, 2);
}

struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotated(x, cos, sin, 1.0f);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {rotated(grads[0], saved[0], saved[1], -1.0f), at::Tensor(), at::Tensor()};  // rotated back
  }
};

at::Tensor with_contiguous_pairs(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

/// Both in the memory layout of rotated().
std::vector<at::Tensor> rotated_on_gpu(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& cos,
                                       const at::Tensor& sin, float sin_sign) {
  const at::Tensor q = with_contiguous_pairs(q_in), k = with_contiguous_pairs(k_in);
  std::vector<at::Tensor> turned;
  gpu::RotateJob jobs[2];
  for (int i = 0; i < 2; ++i) {
    const at::Tensor& x = i == 0 ? q : k;
    const at::Tensor y = at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options());
    jobs[i] = {x.const_data_ptr(), x.stride(0), x.stride(2), x.stride(1), x.size(1), y.mutable_data_ptr()};
    turned.push_back(y.transpose(1, 2));
  }
  const gpu::RotateAngles angles{cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), cos.dim() == 3, sin_sign};
  const auto launch = gpu_launch(q, k, cos, sin);
  launch->check("rotate", launch->kernels().rotate(launch->stream(), q.size(0), q.size(2), q.size(3),
                                                   gpu_type(q.scalar_type()), angles, jobs, 2));
  return turned;
}

struct GpuRotaryFunction : torch::autograd::Function<GpuRotaryFunction> {
  static torch::autograd::tensor_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q,
                                              const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotated_on_gpu(q, k, cos, sin, 1.0f);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    require_no_graph("apply_rotary");
    const auto saved = ctx->get_saved_variables();
    auto back = rotated_on_gpu(grads[0], grads[1], saved[0], saved[1], -1.0f);
    return {std::move(back[0]), std::move(back[1]), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor apply_rotary_reference(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::int64_t half = x.size(-1) / 2;
  const auto table = [&](const at::Tensor& t) {
    const at::Tensor cast = t.to(x.scalar_type());
    return cast.dim() == 3 ? cast.unsqueeze(1) : cast;  // the same angles for every head
  };
  const at::Tensor c = table(cos), s = table(sin);
  const at::Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  return at::cat({a * c - b * s, b * c + a * s}, -1);
}

at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  if (!fusible(x, cos, sin) || !cos.is_contiguous() || !sin.is_contiguous()) return apply_rotary_reference(x, cos, sin);
  return RotaryFunction::apply(x, cos, sin);
}

RotatedPair apply_rotary(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin) {
  const auto fits = [&] {
    if (q.scalar_type() != k.scalar_type() || cos.scalar_type() != at::kFloat || sin.scalar_type() != at::kFloat)
      return false;
    if (!cos.is_contiguous() || !sin.is_contiguous() || q.numel() == 0 || q.dim() != 4 || k.dim() != 4) return false;
    if (q.size(0) != k.size(0) || q.size(2) != k.size(2) || q.size(3) != k.size(3) || q.size(3) % 2 != 0) return false;
    const std::vector<std::int64_t> angles = {q.size(2), q.size(3) / 2},
                                    of_rows = {q.size(0), q.size(2), q.size(3) / 2};
    return cos.sizes() == sin.sizes() && (cos.sizes() == angles || cos.sizes() == of_rows);
  };
  if (!fits() || !gpu_launch(q, k, cos, sin)) return {apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)};
  const auto turned = GpuRotaryFunction::apply(q, k, cos, sin);
  return {turned[0], turned[1]};
}

}  // namespace phalanx::kernels
