// LlamaConfig: the shape of a decoder of the Llama family, with validation, named flavours, and parameter and operation
// counts. Torch-free.
//
// `family` selects what differs from Llama: Mistral (sliding window), Qwen2 (bias of queries, keys and values), Qwen3
// (norms of queries and keys), Mixtral (experts in place of the feed-forward net, sliding window), GPT-2 (LayerNorm,
// learnt positions, GELU in place of SwiGLU, biases everywhere).
//
//   LlamaConfig config = llama_flavor("5M");
//   config.vocab_size = tokenizer.size();
//   config.validate();                        // throws ConfigError: equation, numbers, nearest valid choice
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/models/config/rope_scaling.h"

namespace phalanx::models {

/// Hugging Face's model_type.
enum class LlamaFamily : std::uint8_t { llama, mistral, qwen2, qwen3, gpt2, mixtral };
const char* family_name(LlamaFamily family);
/// Returns "llama, mistral, qwen2, qwen3, gpt2, mixtral".
std::string family_names();
std::optional<LlamaFamily> family_from_name(std::string_view name);

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
  /// A position attends to itself and sliding_window - 1 before it; 0: to all before it. Not in the families llama and
  /// gpt2.
  std::int64_t sliding_window = 0;
  RopeScaling rope_scaling;
  /// Feed-forward nets per layer, with ffn_hidden units each, and how many of them a token goes through. Only in
  /// mixtral; 0: one net for all tokens.
  std::int64_t experts = 0;
  std::int64_t experts_per_token = 0;

  std::int64_t head_dim() const noexcept { return own_head_dim != 0 ? own_head_dim : dim / n_heads; }
  bool is_gpt2() const noexcept { return family == LlamaFamily::gpt2; }
  bool has_experts() const noexcept { return family == LlamaFamily::mixtral; }
  bool has_qkv_bias() const noexcept { return family == LlamaFamily::qwen2 || is_gpt2(); }
  bool has_qk_norm() const noexcept { return family == LlamaFamily::qwen3; }
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

  /// Floating-point operations of forward and backward per token, as torchtitan counts them for MFU:
  ///   6 N + 12 n_layers n_heads head_dim seq
  /// N: parameters that take part in a token's matrix products: all active ones but the input embedding and learnt
  /// positions (a tied matrix does take part, as output). 12 = (q k^T and p v) x (forward 1, backward 2) x (multiply,
  /// add). The causal half is not subtracted. Where documents share a sequence, `seq` is the mean length of a token's
  /// document: the sum of squared lengths / tokens.
  double flops_per_token(double seq) const noexcept;

  bool operator==(const LlamaConfig&) const = default;

 private:
  void validate_family() const;
};

/// A named configuration. An unknown name throws a ConfigError that names the nearest known one.
LlamaConfig llama_flavor(const std::string& name);
std::vector<std::string> llama_flavor_names();

}  // namespace phalanx::models
