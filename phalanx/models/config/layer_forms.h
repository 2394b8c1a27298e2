// Forms of a decoder's layers that differ between families of models. Torch-free.
#pragma once

#include <cstdint>

namespace phalanx {

/// Where the norms of a layer are. x: the residual stream; f: attention or the feed-forward net.
enum class NormPlacement : std::uint8_t {
  before,  // x + f(norm(x))
  after,   // x + norm(f(x))
  both,    // x + post_norm(f(norm(x)))
};

/// The norm of queries and keys before they are rotated: none, over each head, or over all heads together.
enum class QkNorm : std::uint8_t { none, each_head, all_heads };

/// What the gate of a feed-forward net goes through: w2 (activation(w1 x) * w3 x).
enum class GatedActivation : std::uint8_t {
  silu,
  gelu_tanh,
  clamped_silu,  // with limits, and one added to w3 x: kernels/clamped_swiglu.h
};

/// How a mixture's router scores experts, and which experts it chooses for a token.
enum class RouterForm : std::uint8_t {
  softmax,         // scores: shares of all experts; the largest are chosen, in groups those with the largest score
  biased_sigmoid,  // scores: sigmoids; chosen with a bias for each expert, in groups those with the best two experts
};

}  // namespace phalanx
