// The shape of a Llama-family model: validated, named flavours, parameter and operation counts. Knows no tensor.
//
//   LlamaConfig config = llama_flavor("5M");
//   config.vocab_size = tokenizer.size();
//   config.validate();                        // throws ConfigError: equation, numbers, nearest valid choice
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phalanx::models {

struct LlamaConfig {
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

  std::int64_t head_dim() const noexcept { return dim / n_heads; }

  /// Throws ConfigError unless the model can be built.
  void validate() const;
  /// The same for so many tensor-parallel ranks: heads, key and value heads, hidden units, vocabulary, and, if
  /// `seq_len` is not 0, positions that are split over them.
  void validate_tensor_parallel(int ranks, std::int64_t seq_len = 0) const;

  /// Elements of all parameters; a tied matrix counts once.
  std::int64_t parameter_count() const noexcept;

  /// Floating-point operations of forward and backward per token, as torchtitan counts them for MFU:
  ///   6 N + 12 n_layers dim seq
  /// N: parameters that take part in a matrix product, that is all but the input embedding (a tied matrix does take
  /// part, as output). 12 = (q k^T and p v) x (forward 1, backward 2) x (multiply, add), the causal half not taken off.
  double flops_per_token(std::int64_t seq) const noexcept;

  bool operator==(const LlamaConfig&) const = default;
};

/// A named configuration; an unknown name is a ConfigError that names the nearest known one.
LlamaConfig llama_flavor(const std::string& name);
std::vector<std::string> llama_flavor_names();

/// The same parameter in Hugging Face's LlamaForCausalLM ("model.layers.0.self_attn.q_proj.weight"), and back. The
/// values need no permutation: the rotary pairing is Hugging Face's. An unknown name is an Error.
std::string llama_hf_name(const std::string& fqn);
std::string llama_fqn_from_hf(const std::string& hf_name);

}  // namespace phalanx::models
