// Losses of a router that are added to the loss that is trained, by their gradients alone.
//
// The loss that evens out the load of experts (Fedus et al., "Switch Transformers", 2021, equation 4) is, of some
// tokens that are counted together,
//
//   experts * sum over e of f_e P_e     f_e: share of the choices that went to e;  P_e: mean of p_e over the tokens
//
// and 1 if the load is even. Its gradient reaches p; f_e has none. Sigmoids count as their shares of all experts. The
// loss of a step is the mean over its units, each with the weight of its sequences. So a token's p_e gets
//
//   load_weight * experts * f_e / T     T: tokens of a sequence
//
// in every unit, and units differ in f_e alone. It is that
// - of the token's sequence: DeepSeek-AI, "DeepSeek-V3", 2024, equations 17 to 20; Megatron's seq_aux_loss. It does not
//   depend on how sequences are divided into batches;
// - of all sequences of the pass: the micro-batch of a data rank (Megatron's aux_loss), or, summed over data ranks, of
//   all of them (Qiu et al., "Demons in the Detail", 2025; Megatron's global_aux_loss).
//
// The z-loss of a token (Zoph et al., "ST-MoE", 2022, equation 5) is log(sum over e of exp(logit_e))^2.
//
//   mixture.set_losses({.load_weight = 0.01 / sequences_of_global_batch, .z_weight = 1e-3 / tokens_of_global_batch});
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "phalanx/models/config/layer_forms.h"

namespace phalanx::nn {

/// Which tokens of a pass are counted together.
enum class LoadUnit : std::uint8_t { sequence, pass };

struct RouterLosses {
  double load_weight = 0;  // of a sequence; 0: no such loss
  double z_weight = 0;     // of the sum over the tokens of the z-loss; 0: no such loss
  at::Tensor loss_scale;   // 0-dim: what other gradients are multiplied by; undefined: 1
  LoadUnit load_unit = LoadUnit::sequence;
  std::int64_t sequence_ranks = 1;  // how many ranks share each sequence, in equal parts
  /// Sums int64 counts [units, experts] in place over the ranks that have other tokens of a unit. Null: there are none.
  /// Collective: each of them calls it exactly once in each forward pass that records gradients. A block that is
  /// computed again records them the second time alone.
  std::function<void(const at::Tensor& counts)> sum_counts;
};

/// Returns the logits [tokens, experts], of any floating type; their gradient grows by that of the z-loss.
at::Tensor with_z_loss(const at::Tensor& logits, const RouterLosses& losses);

/// Returns the scores, fp32 [sequences * T, experts]; their gradient grows by that of the loss that evens out the load.
/// `chosen`: int64 [sequences * T, k], each token's experts. Calls sum_counts once, if there is one, and is collective
/// then. REQUIRES: each unit has a token.
at::Tensor with_load_loss(const at::Tensor& scores, const at::Tensor& chosen, std::int64_t sequences, RouterForm form,
                          const RouterLosses& losses);

}  // namespace phalanx::nn
