#include "phalanx/nn/expert_counts.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>

namespace phalanx::nn {

at::Tensor count_choices(const at::Tensor& chosen, std::int64_t experts) {
  const at::Tensor counts = at::zeros({chosen.size(0), experts}, chosen.options());
  return counts.scatter_add_(1, chosen, at::ones({}, chosen.options()).expand_as(chosen));
}

at::Tensor end_of_each(const at::Tensor& sorted, std::int64_t count) {
  return at::searchsorted(sorted, at::arange(count, sorted.options()), /*out_int32=*/true, /*right=*/true);
}

at::Tensor count_each(const at::Tensor& sorted, std::int64_t count) {
  const at::Tensor numbers = at::arange(count, sorted.options());
  const at::Tensor ends = at::searchsorted(sorted, numbers, /*out_int32=*/false, /*right=*/true);
  return at::diff(ends, /*n=*/1, /*dim=*/0, /*prepend=*/at::zeros({1}, ends.options()));
}

}  // namespace phalanx::nn
