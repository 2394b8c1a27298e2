#include "phalanx/kernels/rms_norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "phalanx/kernels/fusible.h"
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

}  // namespace

at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor h = x.to(at::kFloat);
  return (h * (h * h).mean(-1, /*keepdim=*/true).add(eps).rsqrt()).to(x.scalar_type()) * weight;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (!fusible(x, weight) || !weight.is_contiguous()) return rms_norm_reference(x, weight, eps);
  return RmsNormFunction::apply(x, weight, eps);
}

}  // namespace phalanx::kernels
