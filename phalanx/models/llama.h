// The Llama family: pre-norm decoder with RMSNorm, rotary embedding, grouped-query attention and SwiGLU. Mistral,
// Qwen2, Qwen3, Mixtral and GPT-2 are of it (LlamaConfig::family).
//
// Parameter names are torchtitan's (tok_embeddings.weight, layers.N.attention.{wq,wk,wv,wo}.weight, and where the
// family has them layers.N.attention.{wq,wk,wv}.bias and layers.N.attention.{q_norm,k_norm}.weight,
// layers.N.feed_forward.{w1,w2,w3}.weight, layers.N.{attention_norm,ffn_norm}.weight, norm.weight, output.weight).
// Mixtral has layers.N.moe.gate.weight and layers.N.moe.experts.E.{w1,w2,w3}.weight in place of the feed-forward net.
// GPT-2 has pos_embeddings.weight, no w3, and a bias with every norm and every linear layer but the output.
// Where they lie in Hugging Face's files: hf_names.h.
// The constructor leaves the parameters without values: nn::initialise(*model, seed) or a checkpoint fills them.
//
//   auto model = std::make_shared<models::Llama>(config);
//   nn::initialise(*model, seed);
//   at::Tensor loss = model->loss(tokens, labels);     // training
//   loss.backward();
//
//   nn::KvCache cache = model->make_cache(batch, max_len);
//   at::Tensor logits = model->forward(prompts, cache, {17, 9});   // inference: [batch, vocab]
//
// A pipeline stage holds a part of the model (llama_part.h), with the same names and starting values:
//
//   models::Llama stage(config, part);                // layers.3.attention.wq.weight is its name in every part
//   at::Tensor h = stage.forward(input);              // tokens or hidden states in, hidden states or logits out
//   at::Tensor loss = last_stage.loss(h, labels);
//
// Tokens and labels are int64 [batch, seq] on the parameters' device, seq at most max_seq_len (Error otherwise).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/llama_part.h"
#include "phalanx/nn/embedding.h"
#include "phalanx/nn/kv_cache.h"
#include "phalanx/nn/transformer_block.h"

namespace phalanx::models {

/// What may stand in for the output layer, where its matrix or its input is split over ranks (llama_parallel.h).
/// `hidden` is what the final norm has made, `weight` what this rank holds of the output matrix.
struct LlamaHead {
  std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& weight)> logits;
  std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels)> loss;
  // What goes from layer to layer is one of so many parts along a dimension, 0 (sequences) or 1 (positions); labels are
  // of all.
  std::int64_t parts = 1;
  std::size_t parts_dim = 1;
  std::int64_t part = 0;  // this rank's
};

class Llama : public nn::Module {
 public:
  explicit Llama(const LlamaConfig& config, nn::TensorOptionsOfModule tensor = {});
  Llama(const LlamaConfig& config, const LlamaPart& part, nn::TensorOptionsOfModule tensor = {});

  /// Tokens to logits [batch, seq, vocab]. A part without the embedding takes hidden states [batch, seq, dim], one
  /// without the output returns them.
  at::Tensor forward(const at::Tensor& input);

  /// Mean cross entropy over the batch * seq tokens given, an fp32 scalar; the logits are never held as a whole.
  /// Ranks with equal shares of a global batch average their losses and gradients to get the global batch's.
  /// A part must have the output.
  at::Tensor loss(const at::Tensor& input, const at::Tensor& labels);

  /// log p(label | tokens up to it), fp32 [batch, seq]; 0 where the label is -1, whose logits are not computed. Records
  /// no gradient; logits of at most 512 positions are held at once. A part must have the output.
  at::Tensor log_likelihoods(const at::Tensor& input, const at::Tensor& labels);

  /// Inference: tokens [rows, n] follow those in the cache's rows from `first_row` on, counts[r] of them real in the
  /// r-th (right padding; empty: all). Returns the logits [rows, vocab] after each row's last real token. Records no
  /// gradient. A part takes and returns hidden states [rows, n, dim] as forward() does; its cache is that of its
  /// layers.
  at::Tensor forward(const at::Tensor& input, nn::KvCache& cache, std::vector<std::int64_t> counts = {},
                     std::int64_t first_row = 0);
  nn::KvCache make_cache(std::int64_t batch, std::int64_t max_len) const;

  /// Embedding; each block; norm and output. Tied embeddings belong to no block and stay gathered.
  std::vector<std::vector<nn::Module*>> shard_units() override;

  void set_head(LlamaHead head) { head_ = std::move(head); }

  const LlamaConfig& config() const noexcept { return config_; }
  const LlamaPart& part() const noexcept { return part_; }
  std::int64_t parameter_count() const noexcept { return config_.parameter_count(); }
  double flops_per_token(std::int64_t seq) const noexcept { return config_.flops_per_token(seq); }

  // Null where the part does not have them.
  std::shared_ptr<nn::Embedding> tok_embeddings;              // also of a part that only uses them for its output
  std::shared_ptr<nn::Embedding> pos_embeddings;              // learnt positions, added to these; null without
  std::vector<std::shared_ptr<nn::TransformerBlock>> layers;  // of the part, its first and last perhaps a half
  std::shared_ptr<nn::Norm> norm;
  std::shared_ptr<nn::Linear> output;  // null where the embeddings are tied, too

 private:
  /// Vectors of the tokens, which stand at int64 `positions` [positions] or [batch, positions]; undefined without
  /// pos_embeddings.
  at::Tensor embed(const at::Tensor& tokens, const at::Tensor& positions);
  at::Tensor hidden(const at::Tensor& input);  // after the final norm, if the part has it: [batch, seq, dim]
  at::Tensor logits(const at::Tensor& hidden);
  at::Tensor loss_of(const at::Tensor& hidden, const at::Tensor& labels);
  at::Tensor forward_cached(const at::Tensor& input, nn::KvCache& cache, std::vector<std::int64_t> counts,
                            std::int64_t first_row);
  /// Tables of at least so many positions, for a pass in which the longest sequence has `longest` tokens.
  nn::RotaryTables rope(std::int64_t positions, std::int64_t longest, at::Device device);
  void check_tokens(const at::Tensor& tokens) const;
  void check_hidden(const at::Tensor& input) const;

  LlamaConfig config_;
  LlamaPart part_;
  LlamaHead head_;
  nn::RotaryTables rope_;  // made at first use, on the device in use, and again for longer sequences
};

}  // namespace phalanx::models
