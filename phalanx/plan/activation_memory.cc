#include "phalanx/plan/activation_memory.h"

#include <algorithm>

namespace phalanx::plan {
namespace {

constexpr std::int64_t kRowsAtOnce = 512;  // of the fused feed-forward and loss (kernels/)

struct Sizes {
  explicit Sizes(const TrainingShape& s)
      : tokens(s.batch * s.seq),
        dim(tokens * s.model.dim),
        queries(tokens * s.model.n_heads * s.model.head_dim()),
        keys(tokens * s.model.n_kv_heads * s.model.head_dim()),
        heads(tokens * s.model.n_heads),
        ffn(tokens * s.model.ffn_hidden),
        rows_at_once(std::min(tokens, kRowsAtOnce)) {}
  // Numbers of elements: of the hidden states, all query heads, all key (or value) heads, one number a head, and inside
  // the feed-forward layer.
  std::int64_t tokens, dim, queries, keys, heads, ffn;
  std::int64_t rows_at_once;
};

// As the fused kernels of the CPU keep them.
ActivationBytes fused(const TrainingShape& shape) {
  const Sizes n(shape);
  ActivationBytes bytes;
  bytes.input = kFloatBytes * n.dim;
  // Attention: its input, normalised; turned queries and keys, values, the result, the softmax's log-sums.
  // Feed-forward: its input, that normalised; gate and up. An inverse RMS a token for either norm.
  bytes.block =
      kFloatBytes * (n.dim + n.dim + 2 * n.queries + 2 * n.keys + n.heads + 2 * n.dim + 2 * n.ffn + 2 * n.tokens);
  // Where it is computed again: the result and log-sums of attention, queries and values before they are turned.
  bytes.kept = kFloatBytes * (2 * n.queries + n.keys + n.heads);
  // In a block's backward pass, at its feed-forward layer: the gradients of its output and input, the sum of both, and
  // four chunks of the hidden layer.
  bytes.backward = kFloatBytes * (3 * n.dim + 4 * n.rows_at_once * shape.model.ffn_hidden);
  // The last norm's input and output, its gradient, a chunk of logits.
  bytes.loss = kFloatBytes * (3 * n.dim + n.rows_at_once * shape.model.vocab_size + 2 * n.tokens);
  // The output layer's gradient is made in the forward pass: beside the one that is there from the micro-batch before.
  if (shape.accumulates) bytes.loss += kFloatBytes * shape.model.vocab_size * shape.model.dim;
  bytes.loss_backward = kFloatBytes * 3 * n.dim;
  return bytes;
}

// As ATen's operators do.
ActivationBytes by_operators(const TrainingShape& shape) {
  const Sizes n(shape);
  const std::int64_t wide =
      shape.weight_bytes == 2 || shape.gather_bytes == 2 ? 2 : kFloatBytes;  // of the residual stream
  const std::int64_t narrow = shape.autocast ? 2 : wide;                     // of matrix products
  const std::int64_t logits = n.tokens * shape.model.vocab_size;
  ActivationBytes bytes;
  bytes.input = wide * n.dim;
  // A norm keeps its input and that times the inverse RMS, in float32, and hands on its output.
  const std::int64_t norm =
      (wide == kFloatBytes ? kFloatBytes : wide + kFloatBytes) * n.dim + wide * n.dim + narrow * n.dim;
  bytes.block = 2 * norm + narrow * (2 * n.queries + 2 * n.keys) + kFloatBytes * n.heads + narrow * 4 * n.ffn +
                kFloatBytes * 2 * n.tokens;
  if (!shape.autocast) bytes.kept = narrow * (n.queries + n.keys);
  bytes.backward = wide * 3 * n.dim + narrow * 3 * n.ffn;
  bytes.loss = norm + kFloatBytes * 2 * logits + (narrow == 2 ? 2 * logits : 0);
  bytes.loss_backward = norm + kFloatBytes * 3 * logits;
  if (shape.autocast) {
    const std::int64_t outside = shape.model.tie_embeddings ? 0 : shape.model.vocab_size * shape.model.dim;
    bytes.always = 2 * (shape.model.parameter_count() - outside);  // 16-bit copies of the weights
  }
  return bytes;
}

}  // namespace

ActivationBytes activation_sizes(const TrainingShape& shape) {
  const bool is_fused = !shape.on_device && !shape.autocast && shape.gather_bytes == kFloatBytes;
  return is_fused ? fused(shape) : by_operators(shape);
}

bool is_recomputed(const TrainingShape& shape, std::int64_t block) {
  return shape.recompute_every > 0 && block % shape.recompute_every == 0;
}

std::vector<std::int64_t> activations_by_moment(const TrainingShape& shape) {
  const ActivationBytes bytes = activation_sizes(shape);
  std::int64_t kept = bytes.always;
  const std::int64_t costly = shape.keeps_costly ? bytes.kept : 0;  // handed to the block when it is computed again
  const std::int64_t recomputed = bytes.input + costly;
  for (std::int64_t i = 0; i < shape.model.n_layers; ++i) kept += is_recomputed(shape, i) ? recomputed : bytes.block;
  std::vector<std::int64_t> moments = {kept + std::max(bytes.loss, bytes.loss_backward)};
  for (std::int64_t i = shape.model.n_layers; i-- > 0;) {
    moments.push_back(kept + bytes.backward + (is_recomputed(shape, i) ? bytes.block - costly : 0));
    kept -= is_recomputed(shape, i) ? recomputed : bytes.block;
  }
  return moments;
}

}  // namespace phalanx::plan
