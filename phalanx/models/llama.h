// The Llama family: pre-norm decoder with RMSNorm, rotary embedding, grouped-query attention and SwiGLU. It includes
// the families that replace some of these (LlamaConfig::family, model_family.h).
//
//   auto model = std::make_shared<models::Llama>(config);
//   nn::initialise(*model, seed);
//   at::Tensor loss = model->loss(tokens, labels);     // training
//   loss.backward();
//
//   nn::KvCache cache = model->make_cache(batch, max_len);
//   at::Tensor logits = model->forward(prompts, cache, {17, 9});   // inference: [batch, vocab]
//
// A pipeline stage holds a part of the model (llama_part.h), with the same names and initial values:
//
//   models::Llama stage(config, part);                // layers.3.attention.wq.weight is its name in every part
//   at::Tensor h = stage.forward(input);              // tokens or hidden states in, hidden states or logits out
//   at::Tensor loss = last_stage.loss(h, labels);
//
// Rows may hold several documents (DocumentBoundaries), and tokens may be without a loss (label kIgnoredLabel):
//
//   model->loss(tokens, labels, {.documents = documents, .divisor = labels_of_the_global_batch});
//
// The constructor leaves the parameters without values: nn::initialise(*model, seed) or a checkpoint fills them.
// Tokens and labels are int64 [batch, seq] on the parameters' device, seq at most max_seq_len (Error otherwise).
//
// Parameter names are torchtitan's:
// - tok_embeddings.weight, norm.weight, output.weight
// - layers.N.attention.{wq,wk,wv,wo}.weight, and in some families layers.N.attention.{wq,wk,wv}.bias and
//   layers.N.attention.{q_norm,k_norm}.weight
// - layers.N.feed_forward.{w1,w2,w3}.weight, layers.N.{attention_norm,ffn_norm}.weight
// - Gemma 3 has layers.N.{attention_post_norm,ffn_post_norm}.weight as well.
// - Mixtral and Qwen3-MoE have layers.N.moe.gate.weight and layers.N.moe.experts.E.{w1,w2,w3}.weight in
//   place of the feed-forward net.
// - DeepSeek has layers.N.attention.{wq_a,wq_b,wkv_a,wkv_b,q_norm,kv_norm}.weight in place of wq, wk and wv (wq with
//   q_lora_rank 0), layers.N.moe.shared_experts.{w1,w2,w3}.weight, and a feed_forward in its first layers.
// - GPT-2 has pos_embeddings.weight, no w3, and a bias with every norm and every linear layer but the output.
// hf_names.h maps them to the names in Hugging Face's files.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/layout/context_cut.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/llama_part.h"
#include "phalanx/models/document_loss.h"
#include "phalanx/nn/context_attention.h"
#include "phalanx/nn/embedding.h"
#include "phalanx/nn/kv_cache.h"
#include "phalanx/nn/transformer_block.h"
#include "phalanx/parallel/context/packed_positions.h"
#include "phalanx/tensor/document_boundaries.h"

namespace phalanx::models {

/// Replaces the output layer if its matrix or its input is split over ranks (llama_parallel.h). `hidden` is the output
/// of the final norm, `weight` what this rank holds of the output matrix.
struct LlamaHead {
  std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& weight)> logits;
  std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                           std::optional<double> divisor, double z_loss_weight, const at::Tensor& token_weights)>
      loss;
  std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels)> token_losses;
  // The activations between the layers are one of `parts` parts along `parts_dim`: 0 (sequences) or 1 (positions).
  // Labels are those of all parts.
  std::int64_t parts = 1;
  std::size_t parts_dim = 1;
  std::int64_t part = 0;  // this rank's part
};

/// Sequences are cut over the ranks of a context-parallel group: see ContextCut.
struct LlamaContext {
  ContextCut cut;
  std::shared_ptr<const nn::ContextAttention> attention;
  std::function<void(const at::Tensor&)> sum;  // over the group, in place
};

struct LlamaLossOptions {
  /// Of the tokens' rows. Null: each row is one document.
  std::shared_ptr<const DocumentBoundaries> documents = nullptr;
  /// The loss is the sum over the tokens that count, divided by this; unset: by their number.
  std::optional<double> divisor = {};
  double z_loss_weight = 0;  // as of kernels::linear_cross_entropy()
  /// Takes the place of the tokens' cross entropy. It needs a divisor. Null: none.
  const DocumentLoss* document_loss = nullptr;
};

class Llama : public nn::Module {
 public:
  explicit Llama(const LlamaConfig& config, nn::TensorOptionsOfModule tensor = {});
  Llama(const LlamaConfig& config, const LlamaPart& part, nn::TensorOptionsOfModule tensor = {});

  /// Maps tokens to logits [batch, seq, vocab]. A part without the embedding takes hidden states [batch, seq, dim]. A
  /// part without the output returns them. `documents` are of the tokens' rows; null: each row is one document.
  at::Tensor forward(const at::Tensor& input, const std::shared_ptr<const DocumentBoundaries>& documents = nullptr);

  /// Mean cross entropy over the tokens whose label is not kIgnoredLabel, an fp32 scalar. The logits are never
  /// held as a whole. If each rank divides by the number of such tokens in the global batch
  /// (LlamaLossOptions::divisor), the sum of the ranks' losses and gradients is that of the global batch.
  /// REQUIRES: the part has the output.
  at::Tensor loss(const at::Tensor& input, const at::Tensor& labels, const LlamaLossOptions& options = {});

  /// log p(label | tokens up to it), fp32 [batch, seq]. It is 0 where the label is -1; the logits of these positions
  /// are not computed. Records no gradient. Logits of at most 512 positions are held at once.
  /// REQUIRES: the part has the output.
  at::Tensor log_likelihoods(const at::Tensor& input, const at::Tensor& labels);

  /// Inference: tokens [rows, n] follow those in the cache's rows from `first_row` on. counts[r] of them are real in
  /// the r-th row (right padding; empty: all). Returns the logits [rows, vocab] after each row's last real token.
  /// Records no gradient. With longrope a row that grows beyond original_max_seq_len is an Error unless it was empty.
  /// A part takes and returns hidden states [rows, n, dim] as forward() does, and its cache covers
  /// its own layers.
  at::Tensor forward(const at::Tensor& input, nn::KvCache& cache, std::vector<std::int64_t> counts = {},
                     std::int64_t first_row = 0);
  nn::KvCache make_cache(std::int64_t batch, std::int64_t max_len) const;

  /// One unit each: the embedding; each block; norm and output. Tied embeddings belong to no unit and stay unsharded.
  std::vector<std::vector<nn::Module*>> shard_units() override;

  void set_head(LlamaHead head) { head_ = std::move(head); }

  /// From now on the activations are those of this rank's positions, and loss() is this rank's part of the
  /// loss: it needs a divisor. Tokens, labels and documents are still whole sequences, the same on all
  /// ranks of the group. For training.
  void set_context(LlamaContext context);

  /// The type and device of hidden states between parts of the model and of keys in a cache. The type is that of
  /// set_activation_dtype(), or else of the parameters.
  at::TensorOptions activations() const;
  /// For a model whose parameters are of several types (lora.h).
  void set_activation_dtype(at::ScalarType dtype) { activation_dtype_ = dtype; }

  const LlamaConfig& config() const noexcept { return config_; }
  const LlamaPart& part() const noexcept { return part_; }
  std::int64_t parameter_count() const noexcept { return config_.parameter_count(); }

  // Null where the part does not have them.
  std::shared_ptr<nn::Embedding> tok_embeddings;              // also in a part that only uses them for its output
  std::shared_ptr<nn::Embedding> pos_embeddings;              // learnt positions, added to these; null without
  std::vector<std::shared_ptr<nn::TransformerBlock>> layers;  // of the part; its first and last may be a half
  std::shared_ptr<nn::Norm> norm;
  std::shared_ptr<nn::Linear> output;  // also null if the embeddings are tied

 private:
  /// Vectors of the tokens, which are at int64 `positions` [positions] or [batch, positions]. `positions` is undefined
  /// without pos_embeddings.
  at::Tensor embed(const at::Tensor& tokens, const at::Tensor& positions);
  /// The rows of a pass, whole and padded.
  struct Rows {
    std::int64_t seq = 0;
    std::shared_ptr<const DocumentBoundaries> documents;
    std::shared_ptr<const PackedPositions> packed;  // null: this rank has a head and a tail, or all
  };
  Rows rows_of(const at::Tensor& input, const std::shared_ptr<const DocumentBoundaries>& documents) const;
  /// This rank's columns of tokens or labels [batch, seq]; `padding` behind the end.
  at::Tensor own_positions(const at::Tensor& ids, std::int64_t padding, const Rows& rows) const;
  /// Those of x, which is padded already: along its last dimension.
  at::Tensor own_of_padded(const at::Tensor& x, const Rows& rows) const;
  void require_no_context(const char* what) const;
  at::Tensor scaled(const at::Tensor& x) const;
  at::Tensor normed(const at::Tensor& x);
  /// After the final norm, if the part has it: [batch, seq, dim].
  at::Tensor hidden(const at::Tensor& input, const Rows& rows);
  /// int64 positions of this rank's tokens, for pos_embeddings.
  at::Tensor learnt_positions(const Rows& rows, at::Device device) const;
  at::Tensor logits(const at::Tensor& hidden);
  at::Tensor loss_of(const at::Tensor& hidden, const at::Tensor& labels, const LlamaLossOptions& options,
                     const Rows& rows);
  /// `weighted`: the sum of the tokens' losses times weights, over the divisor.
  at::Tensor loss_of_documents(const at::Tensor& token_losses, const LlamaLossOptions& options, const Rows& rows,
                               const std::function<at::Tensor(const at::Tensor& token_weights)>& weighted) const;
  at::Tensor forward_cached(const at::Tensor& input, nn::KvCache& cache, std::vector<std::int64_t> counts,
                            std::int64_t first_row);
  /// The rotary tables of the two kinds of layers: with and without a window. Most families have one for both.
  struct Rotation {
    nn::RotaryTables of_all, of_window;
    template <class Change>
    Rotation map(const Change& change) const {
      return {change(of_all), of_window.cos.defined() ? change(of_window) : nn::RotaryTables()};
    }
  };
  /// Tables of at least `positions` positions, for a pass in which the longest sequence has `longest` tokens.
  Rotation rope(std::int64_t positions, std::int64_t longest, at::Device device);
  Rotation make_rope(std::int64_t positions, std::int64_t longest, at::Device device) const;
  /// The tables of each token's position: [seq, head_dim / 2], or with documents [batch, seq, head_dim / 2]. Of the
  /// tokens that this rank has.
  Rotation rope_of(const Rows& rows, at::Device device);
  /// Those of a cache's pass in progress, whose rows have these lengths after it.
  Rotation rope_of_rows(const nn::KvCache& cache, std::int64_t count, const std::vector<std::int64_t>& lengths,
                        at::Device device);
  /// The tables of one of this part's layers, counted from its first.
  const nn::RotaryTables& rope_of_layer(const Rotation& rotation, std::size_t layer) const;
  void check_tokens(const at::Tensor& tokens) const;
  void check_hidden(const at::Tensor& input) const;
  void check_documents(const Rows& rows, const at::Tensor& input) const;

  LlamaConfig config_;
  LlamaPart part_;
  LlamaHead head_;
  LlamaContext context_;  // of one rank: sequences are whole
  std::optional<at::ScalarType> activation_dtype_;
  Rotation rope_;            // made at first use, on the device in use, and again for longer sequences
  Rotation stretched_rope_;  // likewise, of sequences that longrope has other angles for
};

}  // namespace phalanx::models
