#include "phalanx/nn/expert_capacity.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "phalanx/nn/expert_counts.h"

namespace phalanx::nn {
namespace {

/// Of each expert, how many tokens of a sequence chose it in front of each of this rank's two pieces:
/// [sequences, 2, experts]. `counts`: in the pieces themselves.
at::Tensor in_front_of_pieces(const at::Tensor& counts, const ExpertCapacity& capacity) {
  const auto [head, tail] = capacity.cut.pieces_of(capacity.cut.rank);
  const at::Tensor pieces = at::zeros({2 * capacity.cut.ranks, counts.size(0), counts.size(2)}, counts.options());
  pieces[head].copy_(counts.select(1, 0));
  pieces[tail].copy_(counts.select(1, 1));
  capacity.sum_counts(pieces);
  const at::Tensor before = pieces.cumsum(0) - pieces;
  return at::stack({before[head], before[tail]}, 1);
}

}  // namespace

std::int64_t tokens_of_expert(double factor, std::int64_t tokens, std::int64_t experts_per_token,
                              std::int64_t experts) {
  constexpr double kRounding = 1e-12;
  const double even = factor * static_cast<double>(tokens * experts_per_token) / static_cast<double>(experts);
  const double most = std::ceil(even * (1 - kRounding));
  return most < static_cast<double>(tokens) ? static_cast<std::int64_t>(most) : tokens;
}

at::Tensor within_capacity(const at::Tensor& chosen, std::int64_t sequences, std::int64_t experts,
                           const ExpertCapacity& capacity) {
  const bool is_cut = capacity.cut.ranks > 1;
  const std::int64_t pieces = is_cut ? 2 : 1, k = chosen.size(1), lists = sequences * pieces * experts;
  const std::int64_t positions = chosen.size(0) / sequences * capacity.cut.ranks;  // of a whole sequence
  // An expert's tokens in a piece are a list, in order of position.
  const at::Tensor piece = at::arange(sequences * pieces, chosen.options()).view({-1, 1});
  const at::Tensor list = (chosen.reshape({sequences * pieces, -1}) + piece * experts).flatten();  // [tokens * k]
  const auto [sorted, order] = at::sort(list, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor counts = count_each(sorted, lists);
  const at::Tensor begins = counts.cumsum(0) - counts;
  const at::Tensor in_order = at::arange(list.size(0), list.options()) - begins.index_select(0, sorted);
  at::Tensor place = at::empty_like(in_order).scatter_(0, order, in_order);
  if (is_cut) {
    const at::Tensor before = in_front_of_pieces(counts.view({sequences, pieces, experts}), capacity);
    place = place + before.flatten().index_select(0, list);
  }
  return (place < tokens_of_expert(capacity.factor, positions, k, experts)).view(chosen.sizes());
}

}  // namespace phalanx::nn
