// How many tokens of a sequence an expert takes (Lepikhin et al., "GShard", 2020; Fedus et al., "Switch Transformers",
// 2021, equation 3). Of T tokens that choose k of E experts each it is
//
//   capacity = ceil(factor * T k / E)
//
// The first `capacity` tokens of a sequence that choose an expert reach it, in order of position. For a later one this
// expert's result is zero; its other experts, their weights, and the residual stream stay as they are. Megatron calls
// this --moe-expert-capacity-factor with --moe-token-drop-policy position, and counts a micro-batch. Here a sequence
// counts by itself, so that what is dropped does not depend on how sequences are divided into batches, and no token
// depends on a later one.
//
//   mixture.set_capacity({.factor = 1.25,
//                         .cut = plan.context_cut(rank),
//                         .sum_counts = [cp](const at::Tensor& counts) { cp->all_reduce(counts).wait(); }});
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "phalanx/layout/context_cut.h"

namespace phalanx::nn {

struct ExpertCapacity {
  double factor = 0;    // 0: every token reaches its experts
  ContextCut cut = {};  // the positions of every sequence that are here
  /// Sums int64 counts [2 * cut.ranks, sequences, experts] in place over the ranks of `cut`. Null where `cut` has one
  /// rank. Collective: where it has several, each of them calls it exactly once in each forward pass in training mode,
  /// also in one that will be computed again, and then once more.
  std::function<void(const at::Tensor& counts)> sum_counts;
};

/// The capacity of an expert: 1 or more, and at most `tokens`, as a token chooses an expert once at most. Rounding of
/// the product does not count: of 1.1 * 100 * 2 / 4 it is 55. REQUIRES: all are above 0.
std::int64_t tokens_of_expert(double factor, std::int64_t tokens, std::int64_t experts_per_token, std::int64_t experts);

/// bool [sequences * T, k]: which choices are within their experts' capacity. `chosen`: int64 [sequences * T, k], of
/// the positions of `cut`, sequence by sequence; each token's experts are different ones. Collective where the cut has
/// several ranks, as sum_counts is. REQUIRES: capacity.factor > 0; with several ranks T is even.
at::Tensor within_capacity(const at::Tensor& chosen, std::int64_t sequences, std::int64_t experts,
                           const ExpertCapacity& capacity);

}  // namespace phalanx::nn
