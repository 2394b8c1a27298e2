// Attention over rows of equal lengths, as the fused kernels of CUDA compute it: with the log-sum-exps, and a backward
// pass that is given them. The CPU's flash attention computes it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace phalanx::sim_device {

/// q [rows, queries, heads, head_dim], k and v [rows, keys, kv_heads, head_dim]. Causal: the last query is at the last
/// key. `left` and `right`: how many keys before and after its own one a query sees; unset: all.
struct DenseProblem {
  at::Tensor q, k, v;
  bool is_causal = false;
  std::optional<std::int64_t> left = {}, right = {};
  std::optional<double> scale = {};

  /// Throws for what CUDA's kernels do not take.
  void check(bool is_16_bits) const;
  bool has_mask() const { return is_causal || left || right; }
};

struct DenseResult {
  at::Tensor y;         // as q, contiguous
  at::Tensor log_sums;  // float [rows, heads, queries or more]
};
/// Both work on the current stream, under the operator's `name` in traces and races. The queries of log_sums are
/// rounded up to a multiple of `multiple`.
DenseResult dense_attention(const char* name, const DenseProblem& problem, std::int64_t multiple);

/// The gradients of q, k and v.
std::vector<at::Tensor> dense_attention_backward(const char* name, const DenseProblem& problem, const at::Tensor& grad,
                                                 const DenseResult& forward);

}  // namespace phalanx::sim_device
