// scaled_dot_product_attention as one fused operator with a backward of its own, and as the operators of CUDA.
#include "phalanx/testing/sim_device/torch/attention.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include <array>
#include <atomic>
#include <tuple>

#include "phalanx/testing/sim_device/torch/native_operators.h"

namespace phalanx::sim_device {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

std::atomic<at::SDPBackend> chosen = at::SDPBackend::overrideable;

std::int64_t choose_attention(const at::Tensor& query, const at::Tensor& /*key*/, const at::Tensor& /*value*/,
                              const MaybeTensor& /*mask*/, double dropout, bool /*is_causal*/,
                              std::optional<double> /*scale*/, bool /*enable_gqa*/) {
  const bool fused = dropout == 0 && query.dim() == 4 && at::globalContext().userEnabledFlashSDP();
  return static_cast<std::int64_t>(fused ? chosen.load() : at::SDPBackend::math);
}

using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
                           at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Throws for what CUDA's flash and cuDNN attention do not take.
void check_for_cuda(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const auto type = query.scalar_type();
  for (const at::Tensor& t : {query, key, value}) {
    TORCH_CHECK((type == at::kHalf || type == at::kBFloat16) && t.scalar_type() == type && t.dim() == 4 &&
                    t.stride(3) == 1 && t.size(3) % 8 == 0 && t.size(3) <= 256 && t.size(0) == query.size(0) &&
                    query.size(1) % t.size(1) == 0,
                "sim: attention takes no ", t.scalar_type(), " of shape ", t.sizes(), " and strides ", t.strides());
  }
}

/// Throws unless they are what the forward pass was given and returned.
void check_backward(const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& output,
                    const at::Tensor& logsumexp, const c10::SymInt& max_q, const c10::SymInt& max_k) {
  TORCH_CHECK(grad.sizes() == output.sizes() && grad.scalar_type() == output.scalar_type() && grad.stride(3) == 1,
              "sim: the gradient of attention is like its output");
  TORCH_CHECK(logsumexp.scalar_type() == at::kFloat && logsumexp.dim() == 3 && logsumexp.size(2) == query.size(2),
              "sim: log-sum-exps are float32, one for each query");
  TORCH_CHECK(max_q == query.size(2) && max_k == key.size(2), "sim: max_q and max_k are those of the tensors");
}

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

Forward flash_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout,
                        bool is_causal, bool return_debug_mask, std::optional<double> scale) {
  check_for_cuda(query, key, value);
  return fused_attention(query, key, value, {}, dropout, is_causal, return_debug_mask, scale);
}

Gradients flash_attention_backward(const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& value, const at::Tensor& output, const at::Tensor& logsumexp,
                                   const at::Tensor& /*cum_seq_q*/, const at::Tensor& /*cum_seq_k*/, c10::SymInt max_q,
                                   c10::SymInt max_k, double dropout, bool is_causal, const at::Tensor& /*seed*/,
                                   const at::Tensor& /*offset*/, std::optional<double> scale) {
  check_for_cuda(query, key, value);
  check_backward(grad, query, key, output, logsumexp, max_q, max_k);
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, output, logsumexp, dropout,
                                                                  is_causal, {}, scale);
}

Forward cudnn_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const MaybeTensor& bias, bool /*compute_logsumexp*/, double dropout, bool is_causal,
                        bool return_debug_mask, std::optional<double> scale) {
  check_for_cuda(query, key, value);
  return fused_attention(query, key, value, bias, dropout, is_causal, return_debug_mask, scale);
}

Gradients cudnn_attention_backward(const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& value, const at::Tensor& output, const at::Tensor& logsumexp,
                                   const at::Tensor& seed, const at::Tensor& offset, const at::Tensor& bias,
                                   const at::Tensor& cum_seq_q, const at::Tensor& cum_seq_k, c10::SymInt max_q,
                                   c10::SymInt max_k, double dropout, bool is_causal, std::optional<double> scale) {
  TORCH_CHECK(!bias.defined(), "sim: cuDNN attention without a bias");
  return flash_attention_backward(grad, query, key, value, output, logsumexp, cum_seq_q, cum_seq_k, std::move(max_q),
                                  std::move(max_k), dropout, is_causal, seed, offset, scale);
}

}  // namespace

void choose_attention_kernel(at::SDPBackend kernel) { chosen = kernel; }

void register_attention(torch::Library& library) {
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
  library.impl("_fused_sdp_choice", &choose_attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable", &fused_attention);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", &fused_attention_backward);
  library.impl("_scaled_dot_product_flash_attention", &flash_attention);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_attention_backward);
  library.impl("_scaled_dot_product_cudnn_attention", &cudnn_attention);
  library.impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_attention_backward);
}

}  // namespace phalanx::sim_device
