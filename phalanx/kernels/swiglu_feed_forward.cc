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

#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/kernels/fused_linear.h"
#include "phalanx/kernels/fusible.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/row_kernels.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/skinny_gemm.h"
#include "phalanx/kernels/weight_product.h"
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
    const bool needs_dx = ctx->needs_input_grad(0), needs_dw1 = ctx->needs_input_grad(1);
    const bool needs_dw2 = ctx->needs_input_grad(2), needs_dw3 = ctx->needs_input_grad(3);
    const auto later = queue_for(*ctx, w1, w2, w3);
    const std::int64_t kept = later.queue ? rows : chunk;
    const at::Tensor dproduct = at::empty({chunk, hidden}, x.options());
    const at::Tensor products = at::empty({kept, hidden}, x.options());
    const at::Tensor dgates = at::empty_like(products), dups = at::empty_like(products);
    at::Tensor dx = needs_dx ? at::empty_like(x) : at::Tensor();
    WeightGradient dw1, dw2, dw3;
    if (!later.queue && needs_dw1) dw1 = weight_gradient(w1);
    if (!later.queue && needs_dw2) dw2 = weight_gradient(w2);
    if (!later.queue && needs_dw3) dw3 = weight_gradient(w3);
    for (std::int64_t from = 0; from < rows; from += chunk) {
      const std::int64_t n = std::min(chunk, rows - from), at_row = later.queue ? from : 0;
      at::Tensor dh = dproduct.narrow(0, 0, n), h = products.narrow(0, at_row, n);
      const at::Tensor dgate = dgates.narrow(0, at_row, n), dup = dups.narrow(0, at_row, n);
      const at::Tensor x_rows = x.narrow(0, from, n), dy_rows = dy.narrow(0, from, n);
      at::mm_out(dh, dy_rows, w2);
      swiglu_backward_into(gates.narrow(0, from, n), ups.narrow(0, from, n), dh, dgate, dup, h);
      if (dw2.out.defined()) dw2.out.addmm_(dy_rows.t(), h, dw2.beta);
      if (dw1.out.defined()) dw1.out.addmm_(dgate.t(), x_rows, dw1.beta);
      if (dw3.out.defined()) dw3.out.addmm_(dup.t(), x_rows, dw3.beta);
      dw1.beta = dw2.beta = dw3.beta = 1.0;  // the other chunks add
      if (!needs_dx) continue;
      at::Tensor dx_rows = dx.narrow(0, from, n);
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
    return {needs_dx ? dx.view(shape) : dx, dw1.returned, dw2.returned, dw3.returned, at::Tensor()};
  }
};

bool has_contiguous_rows(const at::Tensor& x) { return x.dim() == 2 && x.stride(1) == 1; }

template <class... Tensors>
bool have_rows(const Tensors&... tensors) {
  return ((tensors.is_contiguous() || has_contiguous_rows(tensors)) && ...);
}

template <class... Tensors>
bool are_alike(const at::Tensor& first, const Tensors&... others) {
  return ((others.scalar_type() == first.scalar_type() && others.sizes() == first.sizes()) && ...);
}

/// As 2-dimensional tensors with contiguous rows; contiguous ones of any shape are one row.
struct Rows {
  std::int64_t rows, width, stride;
  explicit Rows(const at::Tensor& x)
      : rows(has_contiguous_rows(x) ? x.size(0) : 1),
        width(x.numel() / std::max<std::int64_t>(rows, 1)),
        stride(has_contiguous_rows(x) ? x.stride(0) : width) {}
};

void swiglu_on_gpu(const GpuLaunch& launch, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& y) {
  const Rows g(gate), u(up);
  launch.check("swiglu", launch.kernels().swiglu(launch.stream(), g.rows, g.width, gpu_type(gate.scalar_type()),
                                                 gate.const_data_ptr(), g.stride, up.const_data_ptr(), u.stride,
                                                 y.mutable_data_ptr()));
}

void swiglu_backward_on_gpu(const GpuLaunch& launch, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dy,
                            const at::Tensor& dgate, const at::Tensor& dup, const at::Tensor& y) {
  const Rows g(gate), u(up), dg(dgate), du(dup);
  launch.check("swiglu_backward",
               launch.kernels().swiglu_backward(launch.stream(), g.rows, g.width, gpu_type(gate.scalar_type()),
                                                gate.const_data_ptr(), g.stride, up.const_data_ptr(), u.stride,
                                                dy.const_data_ptr(), dgate.mutable_data_ptr(), dg.stride,
                                                dup.mutable_data_ptr(), du.stride, y.mutable_data_ptr()));
}

// On a GPU. gate and up are the halves of one tensor [rows, 2 hidden], and so are their gradients. Their product is a
// single one if w1 and w3 are adjacent. Weights that are wider than the products, as under autocast, are cast into the
// halves of one matrix.
struct GpuFeedForwardFunction : torch::autograd::Function<GpuFeedForwardFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& w1,
                            const at::Tensor& w2, const at::Tensor& w3, bool record) {
    const at::Tensor x = x_in.reshape({-1, x_in.size(-1)}).contiguous();  // [rows, dim]
    const std::int64_t rows = x.size(0), hidden = w1.size(0);
    const at::Tensor gate_up = at::empty({rows, 2 * hidden}, x.options());
    at::Tensor gate = gate_up.narrow(1, 0, hidden), up = gate_up.narrow(1, hidden, hidden), w13, used_w2 = w2;
    const bool is_cast = w1.scalar_type() != x.scalar_type();
    if (is_cast) {
      w13 = stacked_as(x.scalar_type(), {w1, w3});
      used_w2 = w2.to(x.scalar_type());
    }
    if (is_cast || are_adjacent({w1, w3})) {
      at::Tensor out = gate_up;
      at::mm_out(out, x, (is_cast ? w13 : stacked({w1, w3})).t());
    } else {
      at::mm_out(gate, x, w1.t());
      at::mm_out(up, x, w3.t());
    }
    const at::Tensor product = at::empty({rows, hidden}, x.options());
    swiglu_on_gpu(*gpu_launch(x), gate, up, product);
    if (record) {
      ctx->save_for_backward({x, w1, w2, w3, gate_up, w13, is_cast ? used_w2 : at::Tensor()});
      save_queue_for_backward(*ctx);
    }
    std::vector<std::int64_t> shape = x_in.sizes().vec();
    shape.back() = w2.size(0);
    return at::mm(product, used_w2.t()).view(shape);
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    require_no_graph("swiglu_feed_forward");
    const at::Tensor &x = saved[0], &w1 = saved[1], &w2 = saved[2], &w3 = saved[3], &gate_up = saved[4];
    const at::Tensor& used_w2 = saved[6].defined() ? saved[6] : w2;
    const at::Tensor w13 = saved[5].defined() || !are_adjacent({w1, w3}) ? saved[5] : stacked({w1, w3});
    const std::int64_t rows = x.size(0), hidden = w1.size(0);
    const at::Tensor dy = grads[0].reshape({rows, -1});
    const at::Tensor dproduct = at::mm(dy, used_w2), product = at::empty_like(dproduct);
    const at::Tensor dgate_up = at::empty_like(gate_up);
    const at::Tensor dgate = dgate_up.narrow(1, 0, hidden), dup = dgate_up.narrow(1, hidden, hidden);
    swiglu_backward_on_gpu(*gpu_launch(x), gate_up.narrow(1, 0, hidden), gate_up.narrow(1, hidden, hidden), dproduct,
                           dgate, dup, product);
    const auto later = queue_for(*ctx, w1, w2, w3);
    const auto weight = [&](const at::Tensor& parameter, const at::Tensor& d, const at::Tensor& input) {
      if (!parameter.requires_grad()) return at::Tensor();
      if (later.queue) {
        later.queue->put(later.key, parameter, [d, input = input.detach()](const WeightGradient& dweight) {
          add_weight_product(d, input, dweight);
        });
        return at::Tensor();
      }
      const WeightGradient dweight = weight_gradient(parameter);
      add_weight_product(d, input, dweight);
      return dweight.returned;
    };
    const at::Tensor dw2 = weight(w2, dy, product);
    at::Tensor dw1, dw3;
    if (!later.queue && w1.requires_grad() && w3.requires_grad()) {
      const std::vector<at::Tensor> both = stacked_weight_gradients(dgate_up, x, {w1, w3});
      dw1 = both[0], dw3 = both[1];
    } else {
      dw1 = weight(w1, dgate, x), dw3 = weight(w3, dup, x);
    }
    if (!ctx->needs_input_grad(0)) return {at::Tensor(), dw1, dw2, dw3, at::Tensor()};
    at::Tensor dx = w13.defined() ? at::mm(dgate_up, w13) : at::mm(dgate, w1);
    if (!w13.defined()) dx.addmm_(dup, w3);
    std::vector<std::int64_t> shape = grads[0].sizes().vec();
    shape.back() = x.size(1);
    return {dx.view(shape), dw1, dw2, dw3, at::Tensor()};
  }
};

struct GpuSwigluFunction : torch::autograd::Function<GpuSwigluFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate_in, const at::Tensor& up_in) {
    const at::Tensor gate = gate_in.contiguous(), up = up_in.contiguous();
    at::Tensor y = at::empty_like(gate);
    swiglu_on_gpu(*gpu_launch(gate), gate, up, y);
    ctx->save_for_backward({gate, up});
    return y;
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    require_no_graph("swiglu");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor dgate = at::empty_like(saved[0]), dup = at::empty_like(saved[1]), dy = grads[0].contiguous();
    const Rows rows(saved[0]);
    const auto launch = gpu_launch(dy);
    launch->check("swiglu_backward",
                  launch->kernels().swiglu_backward(launch->stream(), rows.rows, rows.width, gpu_type(dy.scalar_type()),
                                                    saved[0].const_data_ptr(), rows.stride, saved[1].const_data_ptr(),
                                                    rows.stride, dy.const_data_ptr(), dgate.mutable_data_ptr(),
                                                    rows.stride, dup.mutable_data_ptr(), rows.stride, /*y=*/nullptr));
    return {dgate, dup};
  }
};

bool have_one_type(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  return a.scalar_type() == b.scalar_type() && a.scalar_type() == c.scalar_type();
}

}  // namespace

at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; }

void swiglu_into(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& y) {
  if (are_alike(gate, up, y) && have_rows(gate, up) && y.is_contiguous()) {
    if (const auto launch = gpu_launch(gate, up, y)) return swiglu_on_gpu(*launch, gate, up, y);
  }
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
  if (are_alike(gate, up, dy, dgate, dup, y) && have_rows(gate, up, dgate, dup) && dy.is_contiguous() &&
      y.is_contiguous()) {
    if (const auto launch = gpu_launch(gate, up, dy, dgate, dup, y)) {
      return swiglu_backward_on_gpu(*launch, gate, up, dy, dgate, dup, y);
    }
  }
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

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const bool fits = gate.scalar_type() == up.scalar_type() && gate.sizes() == up.sizes() && gate.numel() > 0;
  return fits && gpu_launch(gate, up) ? GpuSwigluFunction::apply(gate, up) : swiglu_reference(gate, up);
}

at::Tensor swiglu_feed_forward(const at::Tensor& x_in, const at::Tensor& w1, const at::Tensor& w2,
                               const at::Tensor& w3) {
  const bool record = at::GradMode::is_enabled() &&
                      (x_in.requires_grad() || w1.requires_grad() || w2.requires_grad() || w3.requires_grad());
  at::Tensor x = x_in;
  if (gpu_launch(x, w1, w2, w3) && x.numel() > 0 && have_one_type(w1, w2, w3)) {
    x = in_autocast_type(x);
    const bool is_autocast = at::autocast::is_autocast_enabled(x.device().type());
    if (is_autocast || x.scalar_type() == w1.scalar_type()) return GpuFeedForwardFunction::apply(x, w1, w2, w3, record);
  }
  if (!fusible(x, w1, w2, w3) || x.numel() == 0) {
    // Its activations are most of a block's, so none of them is saved, as in the fused function.
    const SavedActivations::Scope nothing(nullptr, SavedActivations::Run::forward);
    return kernels::linear(swiglu(kernels::linear(x, w1), kernels::linear(x, w3)), w2);
  }
  if (can_use_skinny_gemm(x, w1) && can_use_skinny_gemm(x, w3) && w2.is_contiguous()) {
    const at::Tensor gate = skinny_gemm(x, w1);
    swiglu_into(gate, skinny_gemm(x, w3), gate);
    return skinny_gemm(gate, w2);
  }
  return FeedForwardFunction::apply(x, w1, w2, w3, record);
}

}  // namespace phalanx::kernels
