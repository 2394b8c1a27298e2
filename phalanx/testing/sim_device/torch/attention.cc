// scaled_dot_product_attention as one fused operator with a backward of its own. It runs the CPU's flash attention;
// what that does not support (dropout, other than four dimensions) is computed in pieces.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include <array>
#include <tuple>

#include "phalanx/testing/sim_device/torch/native_operators.h"

namespace phalanx::sim_device {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

std::int64_t choose_attention(const at::Tensor& query, const at::Tensor& /*key*/, const at::Tensor& /*value*/,
                              const MaybeTensor& /*mask*/, double dropout, bool /*is_causal*/,
                              std::optional<double> /*scale*/, bool /*enable_gqa*/) {
  const bool fused = dropout == 0 && query.dim() == 4 && at::globalContext().userEnabledFlashSDP();
  return static_cast<std::int64_t>(fused ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
                           at::Tensor, at::Tensor>;

Forward fused_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const MaybeTensor& bias, double dropout, bool is_causal, bool /*return_debug_mask*/,
                        std::optional<double> scale) {
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, bias, scale);
  return {output, logsumexp, {}, {}, query.size(2), key.size(2), {}, {}, {}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fused_attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4> /*wanted*/, const at::Tensor& output, const at::Tensor& logsumexp,
    const at::Tensor& /*cum_seq_q*/, const at::Tensor& /*cum_seq_k*/, c10::SymInt /*max_q*/, c10::SymInt /*max_k*/,
    double dropout, bool is_causal, const at::Tensor& /*seed*/, const at::Tensor& /*offset*/,
    std::optional<double> scale) {
  auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, output, logsumexp, dropout, is_causal, bias.defined() ? MaybeTensor(bias) : std::nullopt,
      scale);
  return {grad_query, grad_key, grad_value, {}};
}

}  // namespace

void register_attention(torch::Library& library) {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
  library.impl("_fused_sdp_choice", &choose_attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable", &fused_attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", &fused_attention_backward);
}

}  // namespace phalanx::sim_device
