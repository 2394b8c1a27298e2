#include "phalanx/kernels/swiglu_feed_forward.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/kernels/fusible.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/row_kernels.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/skinny_gemm.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {
namespace {

constexpr std::int64_t kFeedForwardChunk = 512;    // rows; a fixed number, so that sums over chunks have fixed bits
constexpr std::int64_t kElementwiseGrain = 32768;  // minimum elements per thread

// dy^T x, summed as in the backward pass.
WeightGradientQueue::Write product_by_chunks(const at::Tensor& dy, const at::Tensor& x) {
  return [dy, x](const WeightGradient& dweight) {
    const std::int64_t rows = x.size(0), chunk = std::min(rows, kFeedForwardChunk);
    double beta = dweight.beta;
    for (std::int64_t from = 0; from < rows; from += chunk, beta = 1.0) {
      const std::int64_t n = std::min(chunk, rows - from);
      dweight.out.addmm_(dy.narrow(0, from, n).t(), x.narrow(0, from, n), beta);
    }
  };
}

struct FeedForwardFunction : torch::autograd::Function<FeedForwardFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& w1,
                            const at::Tensor& w2, const at::Tensor& w3, bool record) {
    const at::Tensor x = x_in.reshape({-1, x_in.size(-1)}).contiguous();  // [rows, dim]
    const std::int64_t rows = x.size(0), hidden = w1.size(0);
    const std::int64_t chunk = std::min(rows, kFeedForwardChunk), kept = record ? rows : chunk;
    const at::Tensor gates = at::empty({kept, hidden}, x.options()), ups = at::empty({kept, hidden}, x.options());
    const at::Tensor product = at::empty({chunk, hidden}, x.options());
    const at::Tensor y = at::empty({rows, w2.size(0)}, x.options());
    for (std::int64_t from = 0; from < rows; from += chunk) {
      const std::int64_t n = std::min(chunk, rows - from), at_row = record ? from : 0;
      at::Tensor gate = gates.narrow(0, at_row, n), up = ups.narrow(0, at_row, n), h = product.narrow(0, 0, n);
      at::Tensor y_rows = y.narrow(0, from, n);
      const at::Tensor x_rows = x.narrow(0, from, n);
      at::mm_out(gate, x_rows, w1.t());
      at::mm_out(up, x_rows, w3.t());
      swiglu_into(gate, up, h);
      at::mm_out(y_rows, h, w2.t());
    }
    if (record) {
      ctx->save_for_backward({x, w1, w2, w3, gates, ups});
      save_queue_for_backward(*ctx);
    }
    std::vector<std::int64_t> shape = x_in.sizes().vec();
    shape.back() = w2.size(0);
    return y.view(shape);
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &w1 = saved[1], &w2 = saved[2], &w3 = saved[3], &gates = saved[4], &ups = saved[5];
    const at::Tensor dy = grads[0].reshape({x.size(0), -1});
    const std::int64_t rows = x.size(0), hidden = w1.size(0), chunk = std::min(rows, kFeedForwardChunk);
    const auto later = queue_for(*ctx, w1, w2, w3);
    const std::int64_t kept = later.queue ? rows : chunk;
    const at::Tensor dproduct = at::empty({chunk, hidden}, x.options());
    const at::Tensor products = at::empty({kept, hidden}, x.options());
    const at::Tensor dgates = at::empty_like(products), dups = at::empty_like(products);
    at::Tensor dx = at::empty_like(x);
    WeightGradient dw1, dw2, dw3;
    if (!later.queue) dw1 = weight_gradient(w1), dw2 = weight_gradient(w2), dw3 = weight_gradient(w3);
    for (std::int64_t from = 0; from < rows; from += chunk) {
      const std::int64_t n = std::min(chunk, rows - from), at_row = later.queue ? from : 0;
      at::Tensor dh = dproduct.narrow(0, 0, n), h = products.narrow(0, at_row, n);
      const at::Tensor dgate = dgates.narrow(0, at_row, n), dup = dups.narrow(0, at_row, n);
      const at::Tensor x_rows = x.narrow(0, from, n), dy_rows = dy.narrow(0, from, n);
      at::Tensor dx_rows = dx.narrow(0, from, n);
      at::mm_out(dh, dy_rows, w2);
      swiglu_backward_into(gates.narrow(0, from, n), ups.narrow(0, from, n), dh, dgate, dup, h);
      if (!later.queue) {
        dw2.out.addmm_(dy_rows.t(), h, dw2.beta);
        dw1.out.addmm_(dgate.t(), x_rows, dw1.beta);
        dw3.out.addmm_(dup.t(), x_rows, dw3.beta);
        dw1.beta = dw2.beta = dw3.beta = 1.0;  // the other chunks add
      }
      at::mm_out(dx_rows, dgate, w1);
      dx_rows.addmm_(dup, w3);
    }
    if (later.queue) {
      later.queue->put(later.key, w2, product_by_chunks(dy, products));
      later.queue->put(later.key, w1, product_by_chunks(dgates, x.detach()));
      later.queue->put(later.key, w3, product_by_chunks(dups, x.detach()));
    }
    std::vector<std::int64_t> shape = grads[0].sizes().vec();
    shape.back() = x.size(1);
    return {dx.view(shape), dw1.returned, dw2.returned, dw3.returned, at::Tensor()};
  }
};

}  // namespace

at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; }

void swiglu_into(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& y) {
  if (!fusible(gate, up, y)) {
    at::Tensor out = y;
    at::mul_out(out, at::silu(gate), up);
    return;
  }
  const float *g = gate.const_data_ptr<float>(), *u = up.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  at::parallel_for(0, y.numel(), kElementwiseGrain, [&](std::int64_t begin, std::int64_t end) {
    row_kernels().swiglu(end - begin, g + begin, u + begin, out + begin);
  });
}

void swiglu_backward_into(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dy, const at::Tensor& dgate,
                          const at::Tensor& dup, const at::Tensor& y) {
  if (!fusible(gate, up, dy, dgate, dup, y)) {
    const at::Tensor activated = at::silu(gate);
    at::Tensor into_up = dup, into_gate = dgate, into_y = y;
    at::mul_out(into_up, dy, activated);
    at::silu_backward_out(into_gate, at::mul(dy, up), gate);
    at::mul_out(into_y, activated, up);
    return;
  }
  const float *g = gate.const_data_ptr<float>(), *u = up.const_data_ptr<float>(), *d = dy.const_data_ptr<float>();
  float *dg = dgate.mutable_data_ptr<float>(), *du = dup.mutable_data_ptr<float>(), *out = y.mutable_data_ptr<float>();
  at::parallel_for(0, y.numel(), kElementwiseGrain, [&](std::int64_t begin, std::int64_t end) {
    row_kernels().swiglu_backward(end - begin, g + begin, u + begin, d + begin, dg + begin, du + begin, out + begin);
  });
}

at::Tensor swiglu_feed_forward(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& w3) {
  if (!fusible(x, w1, w2, w3) || x.numel() == 0) {
    // Its activations are most of a block's, so none of them is saved, as in the fused function.
    const SavedActivations::Scope nothing(nullptr, SavedActivations::Run::forward);
    return kernels::linear(swiglu_reference(kernels::linear(x, w1), kernels::linear(x, w3)), w2);
  }
  if (can_use_skinny_gemm(x, w1) && can_use_skinny_gemm(x, w3) && w2.is_contiguous()) {
    const at::Tensor gate = skinny_gemm(x, w1);
    swiglu_into(gate, skinny_gemm(x, w3), gate);
    return skinny_gemm(gate, w2);
  }
  const bool record = at::GradMode::is_enabled() &&
                      (x.requires_grad() || w1.requires_grad() || w2.requires_grad() || w3.requires_grad());
  return FeedForwardFunction::apply(x, w1, w2, w3, record);
}

}  // namespace phalanx::kernels
