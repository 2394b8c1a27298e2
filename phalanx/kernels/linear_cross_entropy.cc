#include "phalanx/kernels/linear_cross_entropy.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/kernels/frozen_weight.h"
#include "phalanx/kernels/fusible.h"
#include "phalanx/kernels/gpu_launch.h"
#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/row_kernels.h"
#include "phalanx/kernels/weight_product.h"
#include "phalanx/tensor/scale_in_place.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {
namespace {

constexpr std::int64_t kLogitsChunk = 512;  // tokens; a fixed number, so that sums over chunks have fixed bits

// What backward() still has to return. Not in save_for_backward(): autograd takes dx over without a copy only if
// nothing else refers to it.
struct HeadGradients : torch::CustomClassHolder {
  at::Tensor dx;  // undefined if it is not needed
  std::optional<EarlyWeightGradient> dweight;
  at::Tensor dlogits, x, weight;  // in place of dweight, if that is computed later
  at::Tensor wide;                // in place of dweight, for a float16 weight on a GPU: float32
  LowRankRows low;
};

// dlogits^T x, in the same chunks as in the forward pass, times the loss's own gradient.
void head_weight_gradient(const at::Tensor& dlogits, const at::Tensor& x, float factor, const WeightGradient& dweight) {
  const bool adds = dweight.beta != 0.0;
  at::Tensor made = adds ? at::empty_like(dweight.out) : dweight.out;
  const std::int64_t rows = x.size(0);
  for (std::int64_t from = 0; from < rows; from += kLogitsChunk) {
    const std::int64_t n = std::min(kLogitsChunk, rows - from);
    made.addmm_(dlogits.narrow(0, from, n).t(), x.narrow(0, from, n), from == 0 ? 0.0 : 1.0);
  }
  if (factor != 1.0f) scale_in_place(made, factor);
  if (adds) dweight.out.add_(made);
}

// For backward(): what forward() has kept. It is there once.
c10::intrusive_ptr<c10::intrusive_ptr_target> taken_gradients(torch::autograd::AutogradContext& ctx) {
  const auto found = ctx.saved_data.find("gradients");
  if (found == ctx.saved_data.end()) {
    throw Error("linear_cross_entropy: a second backward through the same loss; compute the loss again instead");
  }
  auto capsule = std::move(found->second).toCapsule();
  ctx.saved_data.erase(found);
  return capsule;
}

// For forward(): if the weight gradient may be deferred, the logits' gradients are saved, unless they are larger than
// the weight's, which would be saved instead.
WeightGradientQueue::Ref queue_of_head(const at::Tensor& weight, std::int64_t rows, bool record) {
  const bool may_wait = record && weight.requires_grad() && rows <= weight.size(1);
  return may_wait ? WeightGradientQueue::current() : WeightGradientQueue::Ref();
}

void keep_for_later(torch::autograd::AutogradContext& ctx, HeadGradients& gradients, const at::Tensor& dlogits,
                    const at::Tensor& x, const at::Tensor& weight) {
  gradients.dlogits = dlogits;
  gradients.x = x.detach();
  gradients.weight = weight;
  save_queue_for_backward(ctx);
}

// For backward(): writes the weight gradient now, or leaves that to the queue. Returns what backward() returns for the
// weight.
at::Tensor write_or_defer(const torch::autograd::AutogradContext& ctx, const at::Tensor& weight,
                          const WeightGradientQueue::Write& write) {
  if (const auto later = queue_for(ctx, weight); later.queue) {
    later.queue->put(later.key, weight, write);
    return {};
  }
  const WeightGradient now = weight_gradient(weight);
  write(now);
  return now.returned;
}

struct LinearCrossEntropyFunction : torch::autograd::Function<LinearCrossEntropyFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight,
                            const at::Tensor& labels_in, std::optional<double> given, double z_loss_weight,
                            const std::optional<at::Tensor>& token_weights, const std::optional<at::Tensor>& low_x,
                            const std::optional<at::Tensor>& low_weight, bool record) {
    const at::Tensor x = x_in.reshape({-1, x_in.size(-1)}).contiguous(), labels = labels_in.contiguous();
    const std::int64_t rows = x.size(0), vocab = weight.size(0), chunk = std::min(rows, kLogitsChunk);
    check_labels(labels, vocab);
    const double divisor = given ? *given : static_cast<double>(counted_labels(labels));
    const auto later = queue_of_head(weight, rows, record);
    const at::Tensor buffer = at::empty({later.queue ? rows : chunk, vocab}, x.options());
    const at::Tensor losses = at::empty({rows}, x.options());
    auto gradients = c10::make_intrusive<HeadGradients>();
    gradients->low = LowRankRows(low_x, low_weight, record);
    if (record && x_in.requires_grad()) gradients->dx = at::empty_like(x);
    if (record && weight.requires_grad() && !later.queue) gradients->dweight.emplace(weight);
    const float scale = record ? static_cast<float>(1.0 / divisor) : 0.0f;
    const at::Tensor weights_of_rows = token_weights ? token_weights->contiguous() : at::Tensor();
    const float* const weighs = weights_of_rows.defined() ? weights_of_rows.const_data_ptr<float>() : nullptr;
    for (std::int64_t from = 0; from < rows; from += chunk) {
      const std::int64_t n = std::min(chunk, rows - from);
      at::Tensor logits = buffer.narrow(0, later.queue ? from : 0, n);
      const at::Tensor x_rows = x.narrow(0, from, n);
      product_out(logits, x_rows, weight);
      gradients->low.add_to(logits, from);
      float *values = logits.mutable_data_ptr<float>(), *loss = losses.mutable_data_ptr<float>() + from;
      const std::int64_t* label = labels.const_data_ptr<std::int64_t>() + from;
      at::parallel_for(0, n, 16, [&](std::int64_t begin, std::int64_t end) {
        row_kernels().cross_entropy(end - begin, vocab, values + begin * vocab, label + begin, scale,
                                    static_cast<float>(z_loss_weight), loss + begin);
        if (record && weighs != nullptr) {
          row_kernels().scale_rows(end - begin, vocab, weighs + from + begin, values + begin * vocab);
        }
      });
      if (gradients->dx.defined()) {
        at::Tensor dx_rows = gradients->dx.narrow(0, from, n);
        input_gradient_out(dx_rows, logits, weight);
      }
      if (gradients->dweight) gradients->dweight->out().addmm_(logits.t(), x_rows, from == 0 ? 0.0 : 1.0);
      if (record) gradients->low.add_gradients(logits, from);
    }
    if (gradients->dx.defined()) gradients->dx = gradients->dx.view(x_in.sizes());
    if (later.queue) keep_for_later(*ctx, *gradients, buffer, x, weight);
    if (record) ctx->saved_data["gradients"] = c10::IValue::make_capsule(std::move(gradients));
    double sum = 0.0;
    const float* loss = losses.const_data_ptr<float>();
    for (std::int64_t r = 0; r < rows; ++r) {
      sum += static_cast<double>(loss[r]) * (weighs != nullptr ? static_cast<double>(weighs[r]) : 1.0);
    }
    return at::full({}, sum / divisor, x.options());
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto capsule = taken_gradients(*ctx);
    auto& gradients = static_cast<HeadGradients&>(*capsule);
    const float factor = grads[0].item<float>();
    at::Tensor dx = std::move(gradients.dx), dweight;
    if (dx.defined() && factor != 1.0f) scale_in_place(dx, factor);
    if (gradients.dweight) dweight = gradients.dweight->deliver(factor);
    if (gradients.dlogits.defined() && ctx->needs_input_grad(1)) {
      const auto write = [dlogits = std::move(gradients.dlogits), x = std::move(gradients.x),
                          factor](const WeightGradient& out) { head_weight_gradient(dlogits, x, factor, out); };
      dweight = write_or_defer(*ctx, gradients.weight, write);
    }
    auto [dlow, dlow_weight] = gradients.low.deliver(factor);
    const at::Tensor none;
    return {std::move(dx), std::move(dweight), none, none, none, none, std::move(dlow), std::move(dlow_weight), none};
  }
};

// As LinearCrossEntropyFunction, on a GPU and with 16-bit products under autocast. The host waits for nothing. What the
// forward pass keeps are gradients of the sum of the losses, so that small ones are not lost in 16 bits. A float16
// weight's could exceed that type, and is summed in float32.
struct GpuLinearCrossEntropyFunction : torch::autograd::Function<GpuLinearCrossEntropyFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight,
                            const at::Tensor& labels_in, std::optional<double> divisor, double z_loss_weight,
                            const std::optional<at::Tensor>& token_weights, const std::optional<at::Tensor>& low_x,
                            const std::optional<at::Tensor>& low_weight, bool record) {
    const at::Tensor x = x_in.reshape({-1, x_in.size(-1)}).contiguous(), labels = labels_in.contiguous();
    const at::Tensor used = weight.to(x.scalar_type());
    const std::int64_t rows = x.size(0), vocab = weight.size(0), chunk = gpu::rows_of_logits(rows, vocab);
    const auto later = queue_of_head(weight, rows, record);
    const at::Tensor buffer = at::empty({later.queue ? rows : chunk, vocab}, x.options());
    const at::Tensor losses = at::empty({rows}, x.options().dtype(at::kFloat));
    at::Tensor weights_of_rows, shares;
    if (token_weights) {
      weights_of_rows = token_weights->reshape({rows, 1});
      WeightShares of_rows = shares_of_largest(weights_of_rows);
      shares = std::move(of_rows.shares);
      ctx->saved_data["unit"] = std::move(of_rows.largest);
    }
    auto gradients = c10::make_intrusive<HeadGradients>();
    gradients->low = LowRankRows(low_x, low_weight, record);
    if (record && x_in.requires_grad()) gradients->dx = at::empty_like(x);
    if (record && weight.requires_grad() && !later.queue) {
      if (weight.scalar_type() == at::kHalf) {
        gradients->wide = at::empty(weight.sizes(), weight.options().dtype(at::kFloat));
        gradients->weight = weight;
      } else {
        gradients->dweight.emplace(weight);
      }
    }
    for (std::int64_t from = 0; from < rows; from += chunk) {
      const std::int64_t n = std::min(chunk, rows - from);
      at::Tensor logits = buffer.narrow(0, later.queue ? from : 0, n);
      const at::Tensor x_rows = x.narrow(0, from, n);
      at::mm_out(logits, x_rows, used.t());
      gradients->low.add_to(logits, from);
      const auto launch = gpu_launch(logits);
      launch->check("cross_entropy",
                    launch->kernels().cross_entropy(
                        launch->stream(), n, vocab, vocab, gpu_type(logits.scalar_type()), logits.mutable_data_ptr(),
                        labels.const_data_ptr<std::int64_t>() + from, record ? 1.0f : 0.0f,
                        static_cast<float>(z_loss_weight), losses.mutable_data_ptr<float>() + from));
      if (record && shares.defined()) logits.mul_(shares.narrow(0, from, n));
      if (gradients->dx.defined()) {
        at::Tensor dx_rows = gradients->dx.narrow(0, from, n);
        at::mm_out(dx_rows, logits, used);
      }
      const double beta = from == 0 ? 0.0 : 1.0;
      if (gradients->dweight) add_weight_product(logits, x_rows, {gradients->dweight->out(), beta, at::Tensor()});
      if (gradients->wide.defined()) add_weight_product(logits, x_rows, {gradients->wide, beta, at::Tensor()});
      if (record) gradients->low.add_gradients(logits, from);
    }
    if (gradients->dx.defined()) gradients->dx = gradients->dx.view(x_in.sizes());
    if (later.queue) keep_for_later(*ctx, *gradients, buffer, x, weight);
    if (record) ctx->saved_data["gradients"] = c10::IValue::make_capsule(std::move(gradients));
    if (weights_of_rows.defined()) losses.mul_(weights_of_rows.squeeze(1));
    if (divisor) {
      ctx->saved_data["divisor"] = *divisor;
      return losses.sum().div(*divisor);
    }
    const at::Tensor counted = labels.ne(kIgnoredLabel).sum();
    ctx->saved_data["counted"] = counted;
    return losses.sum().div(counted);
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    require_no_graph("linear_cross_entropy");
    const auto capsule = taken_gradients(*ctx);
    auto& gradients = static_cast<HeadGradients&>(*capsule);
    const auto counted = ctx->saved_data.find("counted");
    at::Tensor factor = counted == ctx->saved_data.end() ? grads[0] / ctx->saved_data["divisor"].toDouble()
                                                         : grads[0] / counted->second.toTensor();
    if (const auto unit = ctx->saved_data.find("unit"); unit != ctx->saved_data.end()) {
      factor = factor * unit->second.toTensor();
    }
    at::Tensor dx = std::move(gradients.dx), dweight;
    if (dx.defined()) scale_in_place(dx, factor);
    if (gradients.dweight) dweight = gradients.dweight->deliver(factor);
    if (gradients.wide.defined() && ctx->needs_input_grad(1)) {
      dweight = deliver_float32_sum(gradients.weight, gradients.wide, factor);
    }
    if (gradients.dlogits.defined() && ctx->needs_input_grad(1)) {
      const auto write = [dlogits = std::move(gradients.dlogits), x = std::move(gradients.x),
                          factor](const WeightGradient& out) {
        const bool is_half = out.out.scalar_type() == at::kHalf;
        const bool in_place = out.beta == 0.0 && !is_half;
        at::Tensor made = in_place ? out.out : at::empty_like(out.out, is_half ? at::kFloat : out.out.scalar_type());
        add_weight_product(dlogits, x, {made, 0.0, at::Tensor()});
        scale_in_place(made, factor);
        if (!in_place) out.beta == 0.0 ? out.out.copy_(made) : out.out.add_(made);
      };
      dweight = write_or_defer(*ctx, gradients.weight, write);
    }
    auto [dlow, dlow_weight] = gradients.low.deliver(factor);
    const at::Tensor none;
    return {std::move(dx), std::move(dweight), none, none, none, none, std::move(dlow), std::move(dlow_weight), none};
  }
};

static_assert(kIgnoredLabel == gpu::kIgnoredLabel);

void check_gpu_labels(const at::Tensor& x, const at::Tensor& labels) {
  if (labels.device() == x.device() && labels.scalar_type() == at::kLong && labels.numel() == x.numel() / x.size(-1)) {
    return;
  }
  throw Error(
      fmt::format("linear_cross_entropy: labels are {} [{}] on {}; expected int64, one for each row of [{}], on {}",
                  c10::toString(labels.scalar_type()), fmt::join(labels.sizes(), ", "), labels.device().str(),
                  fmt::join(x.sizes(), ", "), x.device().str()));
}

/// The losses of the tokens, fp32 [rows]: `of_chunk` writes those of some rows of x,
/// whose logits it may put in the buffer.
template <class OfChunk>
at::Tensor losses_by_chunks(const at::Tensor& x, std::int64_t vocab, std::int64_t chunk, const OfChunk& of_chunk) {
  const std::int64_t rows = x.size(0);
  const at::Tensor buffer = at::empty({chunk, vocab}, x.options());
  at::Tensor losses = at::empty({rows}, x.options().dtype(at::kFloat));
  for (std::int64_t from = 0; from < rows; from += chunk) {
    const std::int64_t n = std::min(chunk, rows - from);
    at::Tensor logits = buffer.narrow(0, 0, n);
    of_chunk(logits, x.narrow(0, from, n), from, losses.mutable_data_ptr<float>() + from);
  }
  return losses;
}

at::Tensor gpu_token_losses(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& labels,
                            const LowRankRows& low) {
  const at::Tensor used = weight.to(x.scalar_type());
  const std::int64_t vocab = weight.size(0);
  return losses_by_chunks(
      x, vocab, gpu::rows_of_logits(x.size(0), vocab),
      [&](at::Tensor& logits, const at::Tensor& rows, std::int64_t from, float* losses) {
        at::mm_out(logits, rows, used.t());
        low.add_to(logits, from);
        const auto launch = gpu_launch(logits);
        launch->check("cross_entropy",
                      launch->kernels().cross_entropy(
                          launch->stream(), rows.size(0), vocab, vocab, gpu_type(logits.scalar_type()),
                          logits.mutable_data_ptr(), labels.const_data_ptr<std::int64_t>() + from, 0.0f, 0.0f, losses));
      });
}

at::Tensor cpu_token_losses(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& labels,
                            const LowRankRows& low) {
  const std::int64_t vocab = weight.size(0);
  check_labels(labels, vocab);
  return losses_by_chunks(x, vocab, std::min(x.size(0), kLogitsChunk),
                          [&](at::Tensor& logits, const at::Tensor& rows, std::int64_t from, float* losses) {
                            product_out(logits, rows, weight);
                            low.add_to(logits, from);
                            float* const values = logits.mutable_data_ptr<float>();
                            const std::int64_t* label = labels.const_data_ptr<std::int64_t>() + from;
                            at::parallel_for(0, rows.size(0), 16, [&](std::int64_t begin, std::int64_t end) {
                              row_kernels().cross_entropy(end - begin, vocab, values + begin * vocab, label + begin,
                                                          0.0f, 0.0f, losses + begin);
                            });
                          });
}

}  // namespace

WeightShares shares_of_largest(const at::Tensor& token_weights) {
  const at::Tensor largest = token_weights.abs().amax();
  at::Tensor unit = at::where(largest.gt(0), largest, at::ones_like(largest));
  at::Tensor shares = token_weights / unit;
  return {std::move(shares), std::move(unit)};
}

void require_divisor(std::optional<double> divisor) {
  if (!divisor || *divisor > 0) return;
  throw Error(
      fmt::format("cross entropy: a divisor of {}; expected the number of tokens that count, 1 or more", *divisor));
}

std::int64_t counted_labels(const at::Tensor& labels) {
  const std::int64_t* label = labels.const_data_ptr<std::int64_t>();
  return labels.numel() - std::count(label, label + labels.numel(), kIgnoredLabel);
}

void check_labels(const at::Tensor& labels, std::int64_t vocab) {
  const std::int64_t* label = labels.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < labels.numel(); ++i) {
    if (label[i] != kIgnoredLabel && (label[i] < 0 || label[i] >= vocab)) {
      throw DataError(
          fmt::format("label {} (the {}th of the batch) is outside the vocabulary: expected 0 to {}, or {} for a token "
                      "without loss",
                      label[i], i, vocab - 1, kIgnoredLabel));
    }
  }
}

at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& labels) {
  const at::Tensor rows = logits.to(at::kFloat).flatten(0, -2);
  return at::cross_entropy_loss(rows, labels.flatten(), /*weight=*/{}, at::Reduction::None, kIgnoredLabel)
      .view(labels.sizes());
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels, std::optional<double> divisor,
                         double z_loss_weight, const at::Tensor& token_weights) {
  require_divisor(divisor);
  const at::Tensor rows = logits.to(at::kFloat).flatten(0, -2);
  if (token_weights.defined()) {
    const at::Tensor counts = labels.flatten().ne(kIgnoredLabel);
    at::Tensor losses = token_losses(rows, labels.flatten());
    if (z_loss_weight != 0) {
      losses = losses + at::logsumexp(rows, 1).square().masked_fill(counts.logical_not(), 0) * z_loss_weight;
    }
    const at::Tensor sum = (losses * token_weights.flatten()).sum();
    return divisor ? sum / *divisor : sum / counts.sum();
  }
  const auto reduced = [&](at::Reduction::Reduction reduction) {
    return at::cross_entropy_loss(rows, labels.flatten(), /*weight=*/{}, reduction, kIgnoredLabel);
  };
  at::Tensor loss = divisor ? reduced(at::Reduction::Sum) / *divisor : reduced(at::Reduction::Mean);
  if (z_loss_weight == 0) return loss;
  const at::Tensor counts = labels.flatten().ne(kIgnoredLabel);
  const at::Tensor squares = at::logsumexp(rows, 1).square().masked_fill(counts.logical_not(), 0).sum();
  return loss + squares * z_loss_weight / (divisor ? at::full({}, *divisor, squares.options()) : counts.sum());
}

at::Tensor linear_cross_entropy(const at::Tensor& x_in, const at::Tensor& weight, const at::Tensor& labels,
                                std::optional<double> divisor, double z_loss_weight, const at::Tensor& token_weights,
                                const LowRank& low_in) {
  require_divisor(divisor);
  const bool record =
      at::GradMode::is_enabled() && (x_in.requires_grad() || weight.requires_grad() || low_in.requires_grad());
  const auto given = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  const auto weights = given(token_weights);
  at::Tensor x = x_in;
  if (gpu_launch(x, weight) && x.numel() > 0) {
    check_gpu_labels(x, labels);
    x = in_autocast_type(x);
    const bool is_autocast = at::autocast::is_autocast_enabled(x.device().type());
    if (is_autocast || x.scalar_type() == weight.scalar_type()) {
      const LowRank low = low_in.to(x.scalar_type());
      return GpuLinearCrossEntropyFunction::apply(x, weight, labels, divisor, z_loss_weight, weights, given(low.x),
                                                  given(low.weight), record);
    }
  }
  if (!fusible_product(x, weight) || x.numel() == 0) {
    if (labels.device().is_cpu()) check_labels(labels.contiguous(), weight.size(0));
    return cross_entropy(low_in.added_to(kernels::linear(x, weight)), labels, divisor, z_loss_weight, token_weights);
  }
  const LowRank low = low_in.to(x.scalar_type());
  return LinearCrossEntropyFunction::apply(x, weight, labels, divisor, z_loss_weight, weights, given(low.x),
                                           given(low.weight), record);
}

at::Tensor linear_token_losses(const at::Tensor& x_in, const at::Tensor& weight, const at::Tensor& labels_in,
                               const LowRank& low_in) {
  const at::NoGradGuard no_grad;
  at::Tensor x = x_in.reshape({-1, x_in.size(-1)}).contiguous();
  const at::Tensor labels = labels_in.reshape({-1}).contiguous();
  const auto low = [&] {
    const LowRank same = low_in.to(x.scalar_type());
    return same.defined() ? LowRankRows(same.x, same.weight, /*records=*/false) : LowRankRows();
  };
  if (gpu_launch(x, weight) && x.numel() > 0) {
    check_gpu_labels(x, labels);
    x = in_autocast_type(x);
    const bool is_autocast = at::autocast::is_autocast_enabled(x.device().type());
    if (is_autocast || x.scalar_type() == weight.scalar_type()) {
      return gpu_token_losses(x, weight, labels, low()).view(labels_in.sizes());
    }
  }
  if (!fusible_product(x, weight) || x.numel() == 0) {
    if (labels.device().is_cpu()) check_labels(labels, weight.size(0));
    const at::Tensor logits = low_in.added_to(kernels::linear(x_in, weight));
    return token_losses(logits, labels).view(labels_in.sizes());
  }
  return cpu_token_losses(x, weight, labels, low()).view(labels_in.sizes());
}

}  // namespace phalanx::kernels
