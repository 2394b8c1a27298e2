// LlamaConfig: the shape of a decoder of the Llama family, with validation, named flavours, and parameter and operation
// counts. Torch-free.
//
// `family` selects what differs from Llama (model_family.h): for example Mistral (sliding window), Qwen3 (norms of
// queries and keys), Mixtral (experts in place of the feed-forward net), OLMo 2 (norms behind attention and
// feed-forward net), GPT-2 (LayerNorm, learnt positions, GELU in place of SwiGLU, biases everywhere), DeepSeek (latent
// attention, experts beside a net that all tokens go through).
//
//   LlamaConfig config = llama_flavor("5M");
//   config.vocab_size = tokenizer.size();
//   config.validate();                        // throws ConfigError: equation, numbers, nearest valid choice
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/models/config/model_family.h"
#include "phalanx/models/config/rope_scaling.h"

namespace phalanx::models {

struct LlamaConfig {
  LlamaFamily family = LlamaFamily::llama;
  std::int64_t dim = 256;
  std::int64_t n_layers = 4;
  std::int64_t n_heads = 4;
  std::int64_t n_kv_heads = 2;
  std::int64_t ffn_hidden = 688;
  std::int64_t vocab_size = 4096;
  std::int64_t max_seq_len = 256;
  double rope_theta = 10000.0;
  double norm_eps = 1e-5;
  /// One matrix for input and output. It is named tok_embeddings.weight, and there is no output.weight.
  bool tie_embeddings = false;
  /// Initialises the projections that write to the residual stream (wo, w2) with std 0.02 / sqrt(2 n_layers).
  bool depth_scaled_init = true;

  /// Elements per head; 0: dim / n_heads.
  std::int64_t own_head_dim = 0;
  /// A position attends to itself and sliding_window - 1 before it; 0: to all before it. Not in all families.
  std::int64_t sliding_window = 0;
  RopeScaling rope_scaling;
  /// Feed-forward nets per layer, with ffn_hidden units each, and how many of them a token goes through. Only in
  /// families with experts; 0: one net for all tokens.
  std::int64_t experts = 0;
  std::int64_t experts_per_token = 0;
  /// The weights of a token's experts add up to 1. If not, they are their shares among all experts.
  bool normalise_routing = true;

  /// With sliding_window: layers that attend to all positions all the same, ascending.
  std::vector<std::int64_t> full_layers;
  /// Layers without a rotary embedding, ascending. Only in smollm3.
  std::vector<std::int64_t> unrotated_layers;
  /// Rotary base of layers with a window, where rope_scaling does not apply; 0: as the others. Only in gemma3_text.
  double window_rope_theta = 0.0;
  /// The first elements of a head that are rotated; 0: all. Only in phi3. In latent attention: the last ones.
  std::int64_t rotary_dim = 0;
  /// Scores are divided by the square root of this; 0: head_dim. Only in gemma3_text.
  double query_scalar = 0.0;
  /// Where gate and up of a net are cut off (kernels/clamped_swiglu.h). Only in gpt_oss, where it is above 0.
  double activation_limit = 0.0;
  /// What embeddings and the results of attention and feed-forward nets are multiplied by; the factor of scores, 0: 1 /
  /// sqrt(head_dim); what logits are divided by. Only in granite.
  double embedding_multiplier = 1.0, residual_multiplier = 1.0, attention_multiplier = 0.0, logits_scaling = 1.0;

  /// Latent attention (deepseek_v2, deepseek_v3): elements of the vectors that keys and values, and queries, are made
  /// from (0: queries are made directly), and of a head of values. A head of queries has own_head_dim.
  std::int64_t kv_lora_rank = 0, q_lora_rank = 0, v_head_dim = 0;
  /// In these families: so many layers at the beginning have one net of dense_hidden units in place of experts; in the
  /// others all tokens go through a net of shared_experts * ffn_hidden units besides.
  std::int64_t dense_layers = 0, dense_hidden = 0, shared_experts = 0;
  /// A token's experts are of groups_per_token of so many groups; 0: there are no groups.
  /// Their weights are multiplied by routed_scaling.
  std::int64_t expert_groups = 0, groups_per_token = 0;
  double routed_scaling = 1.0;

  const FamilyTraits& traits() const noexcept { return traits_of(family); }
  std::int64_t head_dim() const noexcept { return own_head_dim != 0 ? own_head_dim : dim / n_heads; }
  std::int64_t value_dim() const noexcept { return v_head_dim != 0 ? v_head_dim : head_dim(); }
  bool is_gpt2() const noexcept { return family == LlamaFamily::gpt2; }
  bool has_experts() const noexcept { return traits().experts; }
  bool has_experts(std::int64_t layer) const noexcept { return traits().experts && layer >= dense_layers; }
  /// Whether biases by which experts are chosen are a part of its weights (models/expert_bias.h).
  bool has_expert_biases() const noexcept { return traits().router == RouterForm::biased_sigmoid; }
  bool has_latent_attention() const noexcept { return traits().latent_attention; }
  /// Hidden units of the net of a layer without experts, and of the one beside experts.
  std::int64_t dense_units() const noexcept { return dense_layers > 0 ? dense_hidden : ffn_hidden; }
  std::int64_t shared_units() const noexcept { return shared_experts * ffn_hidden; }
  bool has_qkv_bias() const noexcept { return traits().qkv_bias; }
  bool has_output_bias() const noexcept { return traits().output_bias; }
  /// Whether experts' projections and the router have biases.
  bool has_expert_net_biases() const noexcept { return traits().expert_biases; }
  bool has_sinks() const noexcept { return traits().sinks; }
  bool has_qk_norm() const noexcept { return traits().qk_norm != QkNorm::none; }
  /// Elements of the two norms of queries and keys.
  std::int64_t q_norm_size() const noexcept;
  std::int64_t k_norm_size() const noexcept;
  /// Norms of the hidden states in a layer: two, or four.
  std::int64_t norms_per_layer() const noexcept { return traits().norms == NormPlacement::both ? 4 : 2; }
  /// The window of one layer; 0: none.
  std::int64_t window_of(std::int64_t layer) const;
  bool is_rotated(std::int64_t layer) const;
  /// Number of matrices in a feed-forward net.
  std::int64_t ffn_matrices() const noexcept { return is_gpt2() ? 2 : 3; }

  /// Throws ConfigError unless the model can be built.
  void validate() const;
  /// Throws ConfigError unless `ranks` tensor-parallel ranks can split the model: heads, key and value heads,
  /// hidden units, vocabulary, and, if `seq_len` is not 0, positions.
  void validate_tensor_parallel(int ranks, std::int64_t seq_len = 0) const;

  /// Elements of all parameters; a tied matrix counts once. active_parameter_count() counts those that a token uses:
  /// without the experts to which it is not sent.
  std::int64_t parameter_count() const noexcept;
  std::int64_t active_parameter_count() const noexcept;
  std::int64_t attention_parameter_count() const noexcept;  // of one layer, without the norms before and behind it

  /// Floating-point operations of forward and backward per token, as torchtitan counts them for MFU:
  ///   6 N + 6 n_layers n_heads (head_dim + value_dim) seq
  /// N: parameters that take part in a token's matrix products: all active ones but the input embedding and learnt
  /// positions (a tied matrix does take part, as output). 6 = (forward 1, backward 2) x (multiply, add), of q k^T and
  /// of p v. The causal half is not subtracted. Where documents share a sequence, `seq` is the mean length of a token's
  /// document: the sum of squared lengths / tokens.
  double flops_per_token(double seq) const noexcept;

  bool operator==(const LlamaConfig&) const = default;

 private:
  void validate_family() const;
  void validate_latent_attention() const;
  void validate_experts() const;
  void validate_layers() const;
  void validate_multipliers() const;
};

/// With full_layers or unrotated_layers as the family has them if nothing else is said, for config.n_layers layers.
LlamaConfig with_layer_pattern(LlamaConfig config);

/// A named configuration of a family. An unknown name throws a ConfigError that names the nearest known one.
LlamaConfig llama_flavor(const std::string& name, LlamaFamily family = LlamaFamily::llama);
std::vector<std::string> llama_flavor_names(LlamaFamily family = LlamaFamily::llama);
/// Of all families, each once: all but "debug" are of one family.
std::vector<std::string> all_flavor_names();
/// The first family that has it; nothing if none does.
std::optional<LlamaFamily> family_of_flavor(const std::string& name);

}  // namespace phalanx::models
