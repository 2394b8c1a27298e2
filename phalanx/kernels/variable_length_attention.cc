#include "phalanx/kernels/variable_length_attention.h"

#include <ATen/ops/_efficient_attention_forward.h>

#include "phalanx/kernels/attention_layout.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/kernels/partial_attention.h"
#include "phalanx/kernels/saved_attention.h"

namespace phalanx::kernels {
namespace {

constexpr std::int64_t kCausalFromTopLeft = 1;  // ATen's custom_mask_type

at::Tensor efficient_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const DocumentBoundaries& documents) {
  const at::Tensor& lengths = documents.cumulative_lengths_on_device();
  const std::int64_t group = q.size(1) / k.size(1);
  // It knows no groups of heads.
  const auto for_each_head = [&](const at::Tensor& t) {
    return (group == 1 ? t : t.repeat_interleave(group, 1)).unsqueeze(0);
  };
  return std::get<0>(at::_efficient_attention_forward(
                         q.unsqueeze(0), for_each_head(k), for_each_head(v), /*bias=*/{}, lengths, lengths,
                         documents.longest(), documents.longest(), /*dropout_p=*/0.0, kCausalFromTopLeft,
                         /*compute_log_sumexp=*/q.requires_grad() || k.requires_grad() || v.requires_grad()))
      .squeeze(0);
}

}  // namespace

bool can_use_variable_lengths(const at::Tensor& q, bool is_windowed) {
  if (q.device().is_cpu() || q.numel() == 0) return false;
  const AttentionKernel kernel = device_kernel_for(in_autocast_type(q).scalar_type(), q.size(3));
  return kernel == AttentionKernel::flash || (kernel == AttentionKernel::efficient && !is_windowed);
}

at::Tensor variable_length_attention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                                     std::int64_t window, const DocumentBoundaries& documents) {
  const at::Tensor q = in_autocast_type(q_in);
  const at::Tensor tokens_q = as_tokens(q), tokens_k = as_tokens(in_autocast_type(k_in)),
                   tokens_v = as_tokens(in_autocast_type(v_in));
  const bool is_flash = device_kernel_for(q.scalar_type(), q.size(3)) == AttentionKernel::flash;
  const at::Tensor y = is_flash ? saved_flash_attention(tokens_q, tokens_k, tokens_v, window, documents)
                                : efficient_attention(tokens_q, tokens_k, tokens_v, documents);
  return from_tokens(y, q.size(0));
}

}  // namespace phalanx::kernels
