#include "phalanx/testing/sim_device/torch/dense_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "phalanx/testing/sim_device/torch/kernel_tensors.h"

namespace phalanx::sim_device {
namespace {

using at::Tensor;

/// Of -infinity where a query may not see a key. On the host.
std::optional<Tensor> mask_of(const DenseProblem& problem) {
  if (!problem.has_mask()) return std::nullopt;
  const std::int64_t queries = problem.q.size(1), keys = problem.k.size(1);
  // CUDA's kernels cut a window to the number of keys.
  const std::int64_t after = problem.is_causal ? 0 : std::min(problem.right.value_or(keys), keys);
  const Tensor distance = at::arange(keys - queries, keys).unsqueeze(1) - at::arange(keys);
  return at::zeros({queries, keys}, problem.q.options())
      .masked_fill((distance < -after).logical_or(distance > std::min(problem.left.value_or(keys), keys)),
                   -std::numeric_limits<double>::infinity());
}

Tensor heads_first(const Tensor& t) { return t.transpose(1, 2); }

DenseProblem on_host(const DenseProblem& problem) {
  DenseProblem views = problem;
  for (Tensor* t : {&views.q, &views.k, &views.v}) *t = kernel_view(*t);
  return views;
}

Tensor empty_contiguous(at::IntArrayRef sizes, at::ScalarType type) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  return empty_on_sim(sizes, strides, type);
}

}  // namespace

void DenseProblem::check(bool is_16_bits) const {
  const auto type = q.scalar_type();
  const bool fits = is_16_bits ? type == at::kHalf || type == at::kBFloat16 : type == at::kFloat;
  TORCH_CHECK(fits, "sim: attention of this kind does not take ", type);
  const std::int64_t multiple = is_16_bits ? 8 : 4;
  for (const Tensor& t : {q, k, v}) {
    TORCH_CHECK(t.dim() == 4 && t.stride(3) == 1 && t.scalar_type() == type && t.size(3) % multiple == 0 &&
                    t.size(3) <= (is_16_bits ? 256 : 1024) && t.size(0) == q.size(0) && q.size(2) % t.size(2) == 0,
                "sim: attention takes no ", t.scalar_type(), " of shape ", t.sizes(), " and strides ", t.strides());
  }
  for (const auto& one : {left, right}) TORCH_CHECK(!one || *one >= 0, "sim: on CUDA a window of ", *one, " is none");
  // A query that sees nothing has no log-sum-exp that could be merged.
  TORCH_CHECK(!left || *left >= q.size(1) - k.size(1), "sim: a window of ", *left, " and ", q.size(1), " queries of ",
              k.size(1), " keys: the last ones see none");
}

DenseResult dense_attention(const char* name, const DenseProblem& problem, std::int64_t multiple) {
  const std::int64_t queries = problem.q.size(1), width = (queries + multiple - 1) / multiple * multiple;
  DenseResult result{.y = empty_contiguous(problem.q.sizes(), problem.q.scalar_type()),
                     .log_sums = empty_contiguous({problem.q.size(0), problem.q.size(2), width}, at::kFloat)};
  std::vector<Access> accesses;
  for (const Tensor& t : {problem.q, problem.k, problem.v}) add_accesses(accesses, t, false);
  for (const Tensor& t : {result.y, result.log_sums}) add_accesses(accesses, t, true);
  launch(problem.q.device().index(), name, std::move(accesses),
         [host = on_host(problem), y = kernel_view(result.y), log_sums = kernel_view(result.log_sums), queries] {
           const auto [out, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
               heads_first(host.q), heads_first(host.k), heads_first(host.v), /*dropout_p=*/0.0, /*is_causal=*/false,
               mask_of(host), host.scale);
           y.copy_(heads_first(out));
           log_sums.fill_(std::numeric_limits<float>::infinity());
           log_sums.narrow(2, 0, queries).copy_(log_sum);
         });
  return result;
}

std::vector<Tensor> dense_attention_backward(const char* name, const DenseProblem& problem, const Tensor& grad,
                                             const DenseResult& forward) {
  TORCH_CHECK(forward.log_sums.is_contiguous() && forward.log_sums.scalar_type() == at::kFloat &&
                  forward.log_sums.size(2) >= problem.q.size(1),
              "sim: log-sum-exps are contiguous float32, one for each query");
  std::vector<Access> accesses;
  for (const Tensor& t : {problem.q, problem.k, problem.v, grad, forward.y, forward.log_sums}) {
    add_accesses(accesses, t, false);
  }
  std::vector<Tensor> grads, views;
  for (const Tensor& t : {problem.q, problem.k, problem.v}) {
    grads.push_back(empty_contiguous(t.sizes(), t.scalar_type()));
    add_accesses(accesses, grads.back(), true);
    views.push_back(kernel_view(grads.back()));
  }
  launch(problem.q.device().index(), name, std::move(accesses),
         [host = on_host(problem), grad = kernel_view(grad), y = kernel_view(forward.y),
          log_sums = kernel_view(forward.log_sums), views = std::move(views)] {
           const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
               heads_first(grad), heads_first(host.q), heads_first(host.k), heads_first(host.v), heads_first(y),
               log_sums.narrow(2, 0, host.q.size(1)), /*dropout_p=*/0.0, /*is_causal=*/false, mask_of(host),
               host.scale);
           views[0].copy_(heads_first(dq));
           views[1].copy_(heads_first(dk));
           views[2].copy_(heads_first(dv));
         });
  return grads;
}

}  // namespace phalanx::sim_device
