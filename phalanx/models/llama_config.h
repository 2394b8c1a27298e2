// The shape of a Llama-family model: validated, named flavours, parameter and operation counts. Knows no tensor.
// The family is what differs from Llama in a small way: Mistral (sliding window), Qwen2 (bias of queries, keys and
// values), Qwen3 (norms of queries and keys).
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

#include "phalanx/nn/rope_scaling.h"

namespace phalanx::models {

/// Hugging Face's model_type.
enum class LlamaFamily : std::uint8_t { llama, mistral, qwen2, qwen3 };
const char* family_name(LlamaFamily family);
/// "llama, mistral, qwen2, qwen3".
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
  /// One matrix for input and output: it is named tok_embeddings.weight, and there is no output.weight.
  bool tie_embeddings = false;
  /// Starts the projections that write to the residual stream (wo, w2) at std 0.02 / sqrt(2 n_layers).
  bool depth_scaled_init = true;

  /// Elements of a head; 0: dim / n_heads.
  std::int64_t own_head_dim = 0;
  /// A position attends to itself and so many less one before it; 0: to all before it. Not in the family llama.
  std::int64_t sliding_window = 0;
  RopeScaling rope_scaling;

  std::int64_t head_dim() const noexcept { return own_head_dim != 0 ? own_head_dim : dim / n_heads; }
  bool has_qkv_bias() const noexcept { return family == LlamaFamily::qwen2; }
  bool has_qk_norm() const noexcept { return family == LlamaFamily::qwen3; }

  /// Throws ConfigError unless the model can be built.
  void validate() const;
  /// The same for so many tensor-parallel ranks: heads, key and value heads, hidden units, vocabulary, and, if
  /// `seq_len` is not 0, positions that are split over them.
  void validate_tensor_parallel(int ranks, std::int64_t seq_len = 0) const;

  /// Elements of all parameters; a tied matrix counts once.
  std::int64_t parameter_count() const noexcept;

  /// Floating-point operations of forward and backward per token, as torchtitan counts them for MFU:
  ///   6 N + 12 n_layers n_heads head_dim seq
  /// N: parameters that take part in a matrix product, that is all but the input embedding (a tied matrix does take
  /// part, as output). 12 = (q k^T and p v) x (forward 1, backward 2) x (multiply, add), the causal half not taken off.
  double flops_per_token(std::int64_t seq) const noexcept;

  bool operator==(const LlamaConfig&) const = default;
};

/// A named configuration; an unknown name is a ConfigError that names the nearest known one.
LlamaConfig llama_flavor(const std::string& name);
std::vector<std::string> llama_flavor_names();

/// Whether a file of Hugging Face's may hold this tensor beside the parameters: what a model computes by itself, or the
/// output matrix of tied embeddings once more.
bool llama_hf_may_ignore(const LlamaConfig& config, const std::string& hf_name);

/// The same parameter in Hugging Face's LlamaForCausalLM ("model.layers.0.self_attn.q_proj.weight"), and back. The
/// values need no permutation: the rotary pairing is Hugging Face's. An unknown name is an Error.
std::string llama_hf_name(const std::string& fqn);
std::string llama_fqn_from_hf(const std::string& hf_name);

}  // namespace phalanx::models
