#include "phalanx/kernels/saved_attention.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_fused_attention_overrideable.h>
#include <ATen/ops/_scaled_dot_product_fused_attention_overrideable_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>
#include <vector>

#include "phalanx/kernels/saved_activations.h"

namespace phalanx::kernels {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

constexpr double kNoDropout = 0.0;

/// As for a layer that is not checkpointed: ATen's choice may depend on whether gradients are recorded, which they are
/// in the second run alone.
at::SDPBackend chosen_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const at::AutoGradMode record(true);
  return static_cast<at::SDPBackend>(
      at::_fused_sdp_choice(q.detach().requires_grad_(), k.detach(), v.detach(), /*attn_mask=*/{}, kNoDropout,
                            /*is_causal=*/true, /*scale=*/std::nullopt, /*enable_gqa=*/q.size(1) != k.size(1)));
}

/// What an operator returns that its backward operator needs: y, log-sum-exps, and the state of random numbers, which
/// is unused without dropout.
tensor_list attend(at::SDPBackend kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto kept = [](auto&& all) {
    return tensor_list{std::get<0>(all), std::get<1>(all), std::get<6>(all), std::get<7>(all)};
  };
  if (kernel == at::SDPBackend::flash_attention) {
    return kept(at::_scaled_dot_product_flash_attention(q, k, v, kNoDropout, /*is_causal=*/true));
  }
  if (kernel == at::SDPBackend::cudnn_attention) {
    return kept(at::_scaled_dot_product_cudnn_attention(q, k, v, /*attn_bias=*/{}, /*compute_log_sumexp=*/true,
                                                        kNoDropout, /*is_causal=*/true));
  }
  return kept(at::_scaled_dot_product_fused_attention_overrideable(q, k, v, /*attn_bias=*/{}, kNoDropout,
                                                                   /*is_causal=*/true));
}

tensor_list attend_backward(at::SDPBackend kernel, const at::Tensor& dy, const tensor_list& saved,
                            const at::Tensor& y) {
  const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &log_sums = saved[3], &seed = saved[4],
                   &offset = saved[5], none;
  const std::int64_t queries = q.size(2), keys = k.size(2);
  const auto gradients = [](auto&& all) { return tensor_list{std::get<0>(all), std::get<1>(all), std::get<2>(all)}; };
  if (kernel == at::SDPBackend::flash_attention) {
    return gradients(at::_scaled_dot_product_flash_attention_backward(
        dy, q, k, v, y, log_sums, none, none, queries, keys, kNoDropout, /*is_causal=*/true, seed, offset));
  }
  if (kernel == at::SDPBackend::cudnn_attention) {
    return gradients(at::_scaled_dot_product_cudnn_attention_backward(dy, q, k, v, y, log_sums, seed, offset,
                                                                      /*attn_bias=*/none, none, none, queries, keys,
                                                                      kNoDropout, /*is_causal=*/true));
  }
  return gradients(at::_scaled_dot_product_fused_attention_overrideable_backward(
      dy, q, k, v, /*attn_bias=*/none, {true, true, true, false}, y, log_sums, none, none, queries, keys, kNoDropout,
      /*is_causal=*/true, seed, offset));
}

struct SavedAttention : torch::autograd::Function<SavedAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            std::int64_t number) {
    const auto kernel = static_cast<at::SDPBackend>(number);
    const tensor_list outputs = computed_once(SavedOp::attention, [&] { return attend(kernel, q, k, v); });
    ctx->save_for_backward({q, k, v, outputs[1], outputs[2], outputs[3]});
    ctx->saved_data["y"] = outputs[0].detach();  // values for the backward pass, outside the graph
    ctx->saved_data["kernel"] = number;
    return outputs[0];
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto kernel = static_cast<at::SDPBackend>(ctx->saved_data["kernel"].toInt());
    tensor_list result = attend_backward(kernel, grads[0], ctx->get_saved_variables(), ctx->saved_data["y"].toTensor());
    result.emplace_back();
    return result;
  }
};

/// The keys before and behind a query that it sees.
struct Window {
  explicit Window(std::int64_t window) {
    if (window > 0) before = window - 1, after = 0;
  }
  std::optional<std::int64_t> before, after;
};

struct SavedFlashAttention : torch::autograd::Function<SavedFlashAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& lengths, std::int64_t longest, std::int64_t window) {
    const Window sees(window);
    const tensor_list outputs = computed_once(SavedOp::attention, [&] {
      auto [y, log_sums, state, unused, mask] = at::_flash_attention_forward(
          q, k, v, lengths, lengths, longest, longest, kNoDropout, /*is_causal=*/true, /*return_debug_mask=*/false,
          /*scale=*/std::nullopt, sees.before, sees.after);
      return tensor_list{std::move(y), std::move(log_sums), std::move(state), std::move(unused)};
    });
    ctx->save_for_backward({q, k, v, lengths, outputs[1], outputs[2], outputs[3]});
    ctx->saved_data["y"] = outputs[0].detach();
    ctx->saved_data["longest"] = longest;
    ctx->saved_data["window"] = window;
    return outputs[0];
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const std::int64_t longest = ctx->saved_data["longest"].toInt();
    const Window sees(ctx->saved_data["window"].toInt());
    auto [dq, dk, dv] = at::_flash_attention_backward(grads[0].contiguous(), saved[0], saved[1], saved[2],
                                                      ctx->saved_data["y"].toTensor(), saved[4], saved[3], saved[3],
                                                      longest, longest, kNoDropout, /*is_causal=*/true, saved[5],
                                                      saved[6], /*scale=*/std::nullopt, sees.before, sees.after);
    return {std::move(dq), std::move(dk), std::move(dv), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::optional<at::SDPBackend> savable_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (SavedActivations::current() == nullptr || q.device().is_cpu() || q.dim() != 4 || q.numel() == 0) return {};
  if (q.size(3) % 8 != 0) return {};  // ATen pads other heads for its kernels
  const at::SDPBackend kernel = chosen_kernel(q, k, v);
  switch (kernel) {
    case at::SDPBackend::flash_attention:
    case at::SDPBackend::cudnn_attention:
    case at::SDPBackend::overrideable:
      return kernel;
    default:
      return {};
  }
}

at::Tensor saved_attention(at::SDPBackend kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return SavedAttention::apply(q, k, v, static_cast<std::int64_t>(kernel));
}

at::Tensor saved_flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t window,
                                 const DocumentBoundaries& documents) {
  return SavedFlashAttention::apply(q, k, v, documents.cumulative_lengths_on_device(), documents.longest(), window);
}

}  // namespace phalanx::kernels
