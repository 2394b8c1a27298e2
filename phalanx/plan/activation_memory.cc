#include "phalanx/plan/activation_memory.h"
#include "phalanx/kernels/gpu/gpu_kernels.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>

#include "phalanx/layout/wide_rows.h"
#include "phalanx/plan/model_partition.h"
#include "phalanx/plan/unit_shapes.h"

namespace phalanx::plan {
namespace {

constexpr std::int64_t kRowsAtOnce = 512;  // of the fused feed-forward and loss (kernels/)

// Gate and up; the product, unless it is made again; what the activation makes of the gate, unless it is.
std::int64_t tensors_of_gates(GatedActivation activation) {
  switch (activation) {
    case GatedActivation::gelu_tanh:
      return 4;
    case GatedActivation::clamped_silu:
      return 3;
    default:
      return 2;
  }
}

struct Sizes {
  explicit Sizes(const TrainingShape& s)
      : model(s),
        tokens(s.batch * s.local_seq()),
        tokens_between(s.sequence_parallel ? tokens / s.tensor_parallel_size : tokens),
        dim(tokens * model.dim),
        between(tokens_between * model.dim),
        queries(tokens * model.queries),
        keys(tokens * model.keys),
        heads(tokens * model.heads),
        ffn(tokens * model.routed * model.feed_forward_hidden),
        routed(s.model.has_experts() ? tokens * model.routed * model.dim : 0),
        sent(s.model.has_experts() ? 2 * routed + tokens * 2 * model.experts : 0),
        left(s.model.has_experts() ? dim + 2 * routed : 2 * dim),
        gates(tensors_of_gates(s.model.traits().activation) * ffn),
        head_norms(s.model.traits().qk_norm == QkNorm::all_heads ? queries + keys + 2 * tokens
                   : s.model.has_qk_norm()
                       ? queries + keys + heads +
                             tokens * std::max<std::int64_t>(s.model.n_kv_heads / s.tensor_parallel_size, 1)
                       : 0),
        latent(s.model.has_latent_attention() ? tokens * (2 * model.q_rank + 2 * model.kv_rank + model.values + 2) : 0),
        shared(2 * tokens * model.shared_hidden),
        statistics(s.model.is_gpt2() ? 2 * tokens_between : tokens_between),
        post_norm(s.model.norms_per_layer() == 4 ? between : 0),
        rows_at_once(std::min(tokens, kRowsAtOnce)),
        rows_of_net(std::min(tokens * model.routed / model.nets, kRowsAtOnce)),
        is_cut(s.tensor_parallel_size > 1),
        splits(is_cut && s.sequence_parallel),
        copies_parts(splits && s.batch > 1) {}
  ModelPartition model;
  // Numbers of elements: the hidden states inside a layer and between layers, all query heads, all key (or value)
  // heads, one number per head, and inside the feed-forward layer.
  std::int64_t tokens, tokens_between, dim, between, queries, keys, heads, ffn;
  // Inputs of experts, which are as many where they are divided among ranks and each gets as many rows.
  std::int64_t routed;
  std::int64_t sent;        // inputs and outputs of experts, and scores
  std::int64_t left;        // inputs and output gradients of feed-forward nets, and of the gate before them
  std::int64_t gates;       // gate and up, and for another activation than SiLU its result and the product
  std::int64_t head_norms;  // queries and keys before their norms, and the statistics of these norms
  std::int64_t latent;      // vectors that queries, keys and values are made from, and results without filling
  std::int64_t shared;      // gate and up of a net beside the experts
  std::int64_t statistics;  // of a norm
  std::int64_t post_norm;   // the input of a second norm behind attention or feed-forward net
  std::int64_t rows_at_once, rows_of_net;  // of the loss, and of a feed-forward net, which has its share of the tokens
  bool is_cut, splits;
  bool copies_parts;  // positions are split and there are several sequences, so parts are joined by a copy
};

// As the fused kernels of the CPU save them.
ActivationBytes fused(const TrainingShape& shape) {
  const Sizes n(shape);
  ActivationBytes bytes;
  bytes.input = kFloatBytes * n.between;
  // Attention: its normalised input; rotated queries and keys, values, the result, the softmax's log-sums.
  // Feed-forward: its input, the normalised input; gate and up. For either norm an inverse RMS per token.
  bytes.attention = kFloatBytes * (n.between + n.post_norm + n.dim + 2 * n.queries + 2 * n.keys + n.heads +
                                   n.statistics + n.head_norms + n.latent);
  bytes.feed_forward = kFloatBytes * (n.between + n.post_norm + n.dim + n.gates + n.sent + n.shared + n.statistics);
  // In a recomputed block: the result and log-sums of attention, queries and values before the rotation. For GELU also
  // its input, which is the output of a linear layer.
  bytes.saved = kFloatBytes * (2 * n.queries + n.keys + n.heads + (shape.model.is_gpt2() ? n.ffn : 0));
  // Inputs and output gradients of the layers, and the product of gate and up with its gradients.
  bytes.attention_deferred = kFloatBytes * (2 * n.dim + 2 * n.queries + 2 * n.keys);
  bytes.feed_forward_deferred = kFloatBytes * (n.left + 3 * n.ffn + n.shared);
  const std::int64_t chunk = n.rows_of_net * n.model.feed_forward_hidden;
  bytes.forward = kFloatBytes * (n.dim + n.between + chunk);
  // In a block's backward pass, at its feed-forward layer: the gradients of its output and input, their sum, and four
  // chunks of the hidden layer.
  bytes.backward = kFloatBytes * (3 * n.dim + 4 * chunk);
  bytes.backward_input = kFloatBytes * (3 * n.dim + chunk);
  if (shape.model.is_gpt2()) bytes.backward = bytes.backward_input = kFloatBytes * (n.dim + n.ffn);
  if (shape.model.traits().activation != GatedActivation::silu) {
    bytes.backward = bytes.backward_input = kFloatBytes * (3 * n.dim + n.ffn);
  }
  if (n.is_cut) {
    // The gradient of the output from all ranks and that of the input to all ranks, with the copy that is summed.
    // Weight gradients, and what they need, wait until this is in flight. In a pipeline they do not: it has its own
    // queue.
    const std::int64_t moving = n.splits ? (n.copies_parts ? n.dim : 0) + 2 * n.between : 2 * n.dim;
    bytes.backward = kFloatBytes * (2 * n.dim + moving + (shape.pipeline ? 4 * chunk : 3 * n.ffn + chunk));
    if (shape.model.is_gpt2()) bytes.backward = kFloatBytes * (2 * n.dim + moving + n.ffn);
    bytes.backward_input = kFloatBytes * (2 * n.dim + moving + chunk);
  }
  // Experts run one at a time, after the activations of the last one are freed. Their exchange is not overlapped. Where
  // matrices are cut, the gradients of all experts' inputs, which are joined then, are more than what one expert needs.
  if (shape.model.has_experts()) {
    const std::int64_t joined = n.is_cut ? (shape.expert_parallel_size > 1 ? 2 : 1) * n.routed : 0;
    // Before the backward pass of the first expert, the output gradients of all are gathered from the order of the
    // tokens and, where experts are divided, sent to the ranks that have them.
    const std::int64_t of_nets = std::max(4 * chunk + joined, n.routed);
    bytes.backward = kFloatBytes * (2 * n.dim + (n.splits ? n.between : 0) + of_nets);
    bytes.forward = kFloatBytes * (n.dim + n.between + std::max(chunk, shape.expert_parallel_size > 1 ? n.routed : 0));
  }
  const bool waits = !n.is_cut && shape.pipeline && n.tokens <= n.model.dim;  // the output layer's own weight gradient
  // The last norm's input and output, its gradient, a chunk of logits.
  // The output layer's gradient, made in the forward pass.
  const std::int64_t early = trains_output(shape) ? kFloatBytes * n.model.table() : 0;
  if (n.is_cut) {
    const std::int64_t blocks = n.tokens > kRowsAtOnce ? 2 : 1;
    bytes.loss = kFloatBytes * (n.between + 2 * n.dim + blocks * n.rows_at_once * n.model.vocab + 2 * n.tokens);
    bytes.loss_backward = kFloatBytes * (2 * n.dim + (n.copies_parts ? n.dim : 0) + 2 * n.between);
    bytes.head = kFloatBytes * (n.between + n.dim + n.tokens_between) + early;
  } else {
    bytes.loss = kFloatBytes * (3 * n.dim + n.rows_at_once * n.model.vocab + 2 * n.tokens);
    bytes.loss_backward = kFloatBytes * 3 * n.dim;
    bytes.head = kFloatBytes * (2 * n.dim + n.tokens + (waits ? n.dim + n.tokens * n.model.vocab : 0));
    if (waits) {
      bytes.head_deferred = kFloatBytes * (n.dim + n.tokens * n.model.vocab);
    } else {
      bytes.head += early;
    }
  }
  // In addition to the full gradient of the previous micro-batch; a pipeline's head already has it. The gradient of
  // tied embeddings is in no unit, and is full.
  const bool has_whole = shape.accumulates && (!shape.accumulates_sharded_gradients() || shape.model.tie_embeddings);
  if ((has_whole || shape.pipeline) && !waits) bytes.loss += early;
  return bytes;
}

// The types on a device: of the residual stream, and of matrix products.
struct DeviceTypes {
  explicit DeviceTypes(const TrainingShape& shape)
      : wide(shape.weight_bytes == 2 || shape.gather_bytes == 2 ? 2 : kFloatBytes), narrow(shape.autocast ? 2 : wide) {}
  std::int64_t wide, narrow;  // bytes
};

// Of the last norm, the output layer and the loss on a GPU. The forward pass makes the gradients of the hidden states
// and of the output layer.
void add_head_on_gpu(const TrainingShape& shape, const Sizes& n, ActivationBytes& bytes) {
  const auto [wide, narrow] = DeviceTypes(shape);
  const std::int64_t early = trains_output(shape) ? shape.weight_bytes * n.model.table() : 0;
  const std::int64_t norm = wide * n.between + kFloatBytes * n.statistics;
  const bool waits = !n.is_cut && shape.pipeline && n.tokens <= n.model.dim;
  if (n.is_cut) {  // logits are in float32, in blocks of which two are there
    const std::int64_t blocks = n.tokens > kRowsAtOnce ? 2 : 1, type = shape.weight_bytes;
    bytes.loss = norm + (narrow + 2 * type) * n.dim +
                 (blocks * kFloatBytes + (type == 2 ? type : 0)) * n.rows_at_once * n.model.vocab +
                 kFloatBytes * 2 * n.tokens;
    bytes.loss_backward = norm + 2 * type * n.dim + wide * n.between;
    bytes.head = norm + type * n.dim + early;
  } else {
    const std::int64_t rows = waits ? n.tokens : kernels::gpu::rows_of_logits(n.tokens, n.model.vocab);
    bytes.loss = norm + narrow * (2 * n.dim + rows * n.model.vocab) +
                 (shape.copies_weights() ? narrow * n.model.table() : 0) + kFloatBytes * 2 * n.tokens;
    bytes.loss_backward = norm + narrow * n.dim + wide * n.between;
    bytes.head_deferred = waits ? narrow * (n.dim + n.tokens * n.model.vocab) : 0;
    bytes.head = norm + narrow * n.dim + (waits ? bytes.head_deferred : early);
  }
  const bool has_whole = shape.accumulates && (!shape.accumulates_sharded_gradients() || shape.model.tie_embeddings);
  if ((has_whole || shape.pipeline) && !waits) bytes.loss += early;
}

// As the GPU kernels save them. Under autocast the residual stream is float32, and all else has 16 bits.
ActivationBytes on_gpu(const TrainingShape& shape) {
  const Sizes n(shape);
  const auto [wide, narrow] = DeviceTypes(shape);
  // 16-bit copies of weights, which the backward pass uses.
  const std::int64_t copied = shape.copies_weights() ? narrow : 0;
  ActivationBytes bytes;
  bytes.input = wide * n.between;
  // A norm saves its input and the inverse RMS. Its output is the input of the products behind it.
  const std::int64_t norm = wide * n.between + kFloatBytes * n.statistics + narrow * n.dim;
  const std::int64_t normed = n.head_norms > 0 ? n.queries + n.keys : 0;
  bytes.attention = norm + narrow * (2 * n.queries + 2 * n.keys + normed) +
                    kFloatBytes * (n.heads + n.head_norms - normed) + narrow * n.latent +
                    copied * n.model.projections();
  bytes.feed_forward = norm + narrow * (n.gates + n.sent + n.shared) +
                       copied * (n.model.feed_forward_matrices() + n.model.shared_matrices());
  bytes.attention += narrow * n.post_norm;
  bytes.feed_forward += narrow * n.post_norm;
  bytes.attention_deferred = narrow * (2 * n.dim + 2 * n.queries + 2 * n.keys);
  bytes.feed_forward_deferred = narrow * (n.left + 3 * n.ffn + n.shared);
  // The product that makes queries, keys and values before the rotation; where that is three, those of queries and
  // values.
  const bool is_one_product = (n.splits ? !shape.autocast : !shape.model.has_qkv_bias()) &&
                              !shape.model.has_latent_attention() && shape.lora.rank == 0;
  bytes.saved = narrow * (n.queries + (is_one_product ? 2 : 1) * n.keys);
  // The result and log-sum-exps of attention, but of memory-efficient attention.
  const bool saves_attention =
      narrow == 2 || shape.model.sliding_window > 0 || shape.model.has_sinks() || shape.context_parallel_size > 1;
  if (saves_attention) bytes.saved += narrow * n.queries + kFloatBytes * n.heads;
  // At a feed-forward net: the product of gate and up; in its backward pass also that product's gradient and those of
  // gate and up, and the gradients of the block's output, of the net's and of its input.
  // Grouped products compute all experts at a time, and all their weights' gradients before these are added up.
  const bool is_grouped = shape.model.has_experts() && narrow == 2 && !n.is_cut && shape.lora.rank == 0 &&
                          shape.model.traits().activation == GatedActivation::silu;
  const std::int64_t product = narrow * n.ffn / (is_grouped ? 1 : n.model.nets);
  bytes.forward = wide * n.between + narrow * n.dim + product;
  bytes.backward = wide * n.between + narrow * n.dim + (shape.autocast ? narrow * n.dim : 0);
  // The gradients of all w2 are made while all four are there, those of all w1 and w3 beside two of them.
  const std::int64_t of_w2 = is_grouped ? narrow * n.model.feed_forward_matrices() / 3 : 0;
  bytes.backward += std::max(4 * product + of_w2, 2 * product + 3 * of_w2);
  // And of the results of experts, for each of a token's.
  if (shape.model.has_experts()) bytes.backward += narrow * (n.dim + n.routed);
  if (shape.expert_parallel_size > 1) bytes.forward += narrow * n.routed;
  if (n.is_cut) bytes.backward += narrow * 2 * n.dim;  // gradients on their way to and from other ranks
  bytes.backward_input = bytes.backward;
  add_head_on_gpu(shape, n, bytes);
  return bytes;
}

// As ATen's operators save them: in 16 bits on the CPU, and GPT-2's blocks on a GPU.
ActivationBytes by_operators(const TrainingShape& shape) {
  const Sizes n(shape);
  const auto [wide, narrow] = DeviceTypes(shape);
  const std::int64_t logits = n.tokens * n.model.vocab;
  ActivationBytes bytes;
  bytes.input = wide * n.between;
  // A norm saves its input and the input times the inverse RMS, in float32, and passes on its output.
  const std::int64_t scaled =
      shape.model.is_gpt2() ? 0 : (wide == kFloatBytes ? kFloatBytes : wide + kFloatBytes) * n.between;
  const std::int64_t norm = scaled + wide * n.between + narrow * n.dim;
  bytes.attention = norm + narrow * (2 * n.queries + 2 * n.keys) + kFloatBytes * n.heads + kFloatBytes * n.statistics;
  if (n.head_norms > 0) {
    const std::int64_t normed = n.queries + n.keys;
    bytes.attention += narrow * normed + (wide == kFloatBytes ? kFloatBytes : wide + kFloatBytes) * normed +
                       kFloatBytes * (n.head_norms - normed);
  }
  const std::int64_t hidden = shape.model.is_gpt2() ? 2 : 4;
  bytes.attention += narrow * n.latent;
  bytes.feed_forward = norm + narrow * (hidden * n.ffn + n.sent + 2 * n.shared) + kFloatBytes * n.statistics;
  if (n.post_norm > 0) {
    bytes.attention += scaled + wide * n.post_norm;
    bytes.feed_forward += scaled + wide * n.post_norm;
  }
  bytes.attention_deferred = narrow * (2 * n.dim + 2 * n.queries + 2 * n.keys);
  bytes.feed_forward_deferred = narrow * (n.left + 3 * n.ffn + n.shared);
  // Queries and values before the rotation; GELU's own input; on the host the result and log-sums of attention.
  bytes.saved = narrow * (n.queries + n.keys + (shape.model.is_gpt2() ? n.ffn : 0));
  if (!shape.on_device || narrow == 2) bytes.saved += narrow * n.queries + kFloatBytes * n.heads;
  bytes.forward = wide * (n.dim + n.between) + narrow * n.ffn;
  bytes.backward = wide * 3 * n.dim + narrow * 3 * n.ffn;
  bytes.backward_input = bytes.backward;
  bytes.loss = norm + kFloatBytes * 2 * logits + (narrow == 2 ? 2 * logits : 0);
  bytes.loss_backward = norm + kFloatBytes * 3 * logits;
  bytes.head = bytes.loss;
  if (shape.on_device) add_head_on_gpu(shape, n, bytes);
  if (shape.copies_weights()) {
    const bool tied = shape.model.tie_embeddings;
    const std::int64_t outside = (tied ? 0 : n.model.table()) + n.model.positions;
    // 16-bit copies of the weights, which the backward pass needs; for recomputed blocks, those of one block at a time.
    std::int64_t recomputed = 0;
    for (std::int64_t i = 0; i < shape.model.n_layers; ++i) recomputed += is_recomputed(shape, i) ? 1 : 0;
    const std::int64_t absent =
        std::max<std::int64_t>(recomputed - 1, 0) * (n.model.attention() + n.model.feed_forward());
    bytes.always = 2 * (n.model.parameters(models::full_llama(shape.model), tied) - outside - absent);
  }
  return bytes;
}

// Layers of attention that read the hidden states.
constexpr std::array kReadHidden = {"wq", "wk", "wv", "wq_a", "wkv_a"};

// Of the net that may have adapters: with experts that beside them, or that of the first layers, on average.
std::int64_t hidden_of_net(const Sizes& n, std::int64_t layers) {
  if (n.model.experts == 0) return n.ffn;
  const std::int64_t dense = n.model.dense_layers;
  return n.tokens * (dense * n.model.dense_hidden + (layers - dense) * n.model.shared_hidden) / layers;
}

std::int64_t input_of_linear(const Sizes& n, std::int64_t layers, const std::string& name) {
  if (name == "w2") return hidden_of_net(n, layers);
  if (name == "wo") return n.model.kv_rank > 0 ? n.tokens * n.model.values : n.queries;
  if (name == "wq_b") return n.tokens * n.model.q_rank;
  if (name == "wkv_b") return n.tokens * n.model.kv_rank;
  return n.dim;
}

// What adapters save and need beside it, and what their layers do because they are not fused any more.
void add_adapters(const TrainingShape& shape, bool was_fused, ActivationBytes& bytes) {
  const Sizes n(shape);
  const std::int64_t type = shape.autocast || shape.gather_bytes == 2 ? 2 : kFloatBytes;
  std::set<std::string> adapted;  // in some layer
  for (const std::string& layer : models::lora_layers(shape.model, shape.lora)) {
    adapted.insert(layer.substr(layer.rfind('.') + 1));
  }
  const bool drops = shape.lora.dropout > 0;
  if (adapted.erase("output") > 0) {
    // The product with A, scaled, and its gradient; and the gradient of B, which is made in the forward pass.
    const std::int64_t saved = type * (3 * n.tokens * shape.lora.rank + (drops ? 2 * n.dim : 0)) +
                               kFloatBytes * n.model.vocab * shape.lora.rank;
    bytes.loss += saved;
    bytes.head += saved;
    bytes.loss_backward += saved;
  }
  const auto has = [&](const char* name) { return adapted.contains(name); };
  // Of each adapter the product with A, and with dropout its own input and the mask in place of the common input.
  for (const std::string& name : adapted) {
    const std::int64_t input = input_of_linear(n, shape.model.n_layers, name);
    const std::int64_t saved = type * (n.tokens * shape.lora.rank + (drops ? 2 * input : 0));
    (name.starts_with("w") && name.size() == 2 && name[1] <= '3' ? bytes.feed_forward : bytes.attention) += saved;
  }
  if (drops && std::ranges::any_of(kReadHidden, has)) bytes.attention -= type * n.dim;
  if (drops && (has("w1") || has("w3"))) bytes.feed_forward -= type * n.dim;
  // The adapter of the layer behind GELU keeps its result.
  if (shape.model.is_gpt2() && (drops || !has("w2"))) bytes.feed_forward -= type * n.ffn;
  if (!was_fused || shape.model.is_gpt2()) return;
  if (!has("w1") && !has("w2") && !has("w3") && !shape.has_narrow_base()) return;
  // SiLU's result, and the product if it goes into an adapter; in the backward pass the gradient of the product, when
  // the product is gone.
  const std::int64_t hidden = hidden_of_net(n, shape.model.n_layers);
  bytes.feed_forward += type * hidden * (has("w2") && !drops ? 2 : 1);
  bytes.forward = std::max(bytes.forward, type * (n.dim + n.between + 2 * hidden));
  if (!n.is_cut && n.model.experts == 0) bytes.backward = bytes.backward_input = type * (3 * n.dim + n.ffn);
}

// Of a base in fewer bits than the activations have, one weight at a time is widened, or on the host some of its rows;
// for activations in 16 bits one in 4 bits is widened to float32 first.
void add_wide_weight(const TrainingShape& shape, ActivationBytes& bytes) {
  const Sizes n(shape);
  const bool is_narrow = shape.autocast || shape.gather_bytes == 2;
  if (is_narrow && !shape.lora.has_nf4_base()) return;
  const std::int64_t each = kFloatBytes + (is_narrow ? 2 : 0);
  const std::int64_t weight = n.model.feed_forward_matrices() / n.model.matrices_of_net;
  const std::int64_t wide = each * (is_narrow || shape.on_device ? weight : std::min(weight, kWideElements));
  for (std::int64_t* of : {&bytes.forward, &bytes.backward, &bytes.backward_input}) *of += wide;
}

}  // namespace

ActivationBytes activation_sizes(const TrainingShape& shape) {
  const bool is_fused = !shape.on_device && !shape.autocast && shape.gather_bytes == kFloatBytes;
  const bool is_on_gpu = shape.on_device && !shape.model.is_gpt2();
  ActivationBytes bytes = is_on_gpu ? on_gpu(shape) : is_fused ? fused(shape) : by_operators(shape);
  if (shape.lora.rank > 0) add_adapters(shape, is_fused || is_on_gpu, bytes);
  if (shape.has_narrow_base()) add_wide_weight(shape, bytes);
  if (shape.context_parallel_size > 1 && shape.gathers_keys) {
    // Attention saves the keys and values of all ranks of context parallelism, in place of this rank's.
    const std::int64_t type = is_fused ? kFloatBytes : shape.autocast || shape.gather_bytes == 2 ? 2 : kFloatBytes;
    bytes.attention += type * 2 * (shape.context_parallel_size - 1) * Sizes(shape).keys;
  }
  return bytes;
}

// The layers before it save nothing, as neither they nor what is before them is trained.
static std::int64_t first_layer_with_backward(const TrainingShape& shape) {
  if (!shape.trains_a_part() || trains_embedding(shape)) return 0;
  for (std::int64_t layer = 0; layer < shape.model.n_layers; ++layer) {
    if (elements_of_part(shape, {.begin = 2 * layer, .end = 2 * layer + 2}).trained > 0) return layer;
  }
  return shape.model.n_layers;
}

bool is_recomputed(const TrainingShape& shape, std::int64_t block) {
  return shape.recompute_every > 0 && block % shape.recompute_every == 0;
}

std::vector<std::int64_t> activation_memory_timeline(const TrainingShape& shape) {
  const ActivationBytes bytes = activation_sizes(shape);
  std::int64_t saved = bytes.always;
  const std::int64_t costly = shape.uses_op_sac ? bytes.saved : 0;  // passed to the block when it is recomputed
  const std::int64_t recomputed = bytes.input + costly;
  const std::int64_t first = first_layer_with_backward(shape);
  const auto saved_by = [&](std::int64_t layer) {
    return layer < first ? 0 : is_recomputed(shape, layer) ? recomputed : bytes.block();
  };
  for (std::int64_t i = 0; i < shape.model.n_layers; ++i) saved += saved_by(i);
  // A last block that saves nothing still passes on its input and its output until the loss is there.
  const std::int64_t passed = first == shape.model.n_layers ? 2 * bytes.input : 0;
  std::vector<std::int64_t> moments = {saved + passed + std::max(bytes.loss, bytes.loss_backward)};
  for (std::int64_t i = shape.model.n_layers; i-- > 0;) {
    const std::int64_t again = is_recomputed(shape, i) ? bytes.block() - costly : 0;
    moments.push_back(i < first ? saved : saved + bytes.backward + again);
    saved -= saved_by(i);
  }
  return moments;
}

}  // namespace phalanx::plan
