// Which linear layers of a model get low-rank adapters (LoRA), and how large they are. Torch-free.
//
//   const LoraOptions lora{.rank = 16, .alpha = 32, .target_modules = {"q_proj", "v_proj"}};
//   lora_layers(config, lora);      // layers.0.attention.wq, layers.0.attention.wv, layers.1.attention.wq, ...
//
// A target is one of
// - "all-linear": every linear layer of the blocks but routers and experts. Experts that all tokens share are linear
//   layers like others;
// - a layer's last name or more of its end, as in Hugging Face's or in ours: q_proj, self_attn.q_proj, wq, lm_head;
// - a shell's pattern over whole names: layers.[0-3].attention.*, model.layers.0.*.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

struct LoraOptions {
  std::int64_t rank = 0;  // 0: no adapters
  double alpha = 16.0;    // adapters are scaled by scale()
  double dropout = 0.0;   // probability, of elements of an adapter's input
  std::vector<std::string> target_modules = {"all-linear"};
  std::string base_dtype = "float32";  // in which the frozen weights are stored: kBaseDtypes
  // rank-stabilised LoRA (Kalajdzievski, arXiv:2312.03732): scaled by alpha / sqrt(rank)
  bool use_rslora = false;
  bool zero_b = true;  // lora_B starts as zeros, so that the model starts as the base is; false: random, for tests

  /// Whether there is a frozen base, and it is stored in fewer bits than float32, or in NF4.
  bool has_narrow_base() const noexcept { return rank > 0 && base_dtype != "float32"; }
  bool has_nf4_base() const noexcept { return rank > 0 && base_dtype == "nf4"; }
  double scale() const noexcept {
    const auto r = static_cast<double>(rank);
    return alpha / (use_rslora ? std::sqrt(r) : r);
  }
  bool operator==(const LoraOptions&) const = default;
};

inline constexpr std::array kBaseDtypes = {"float32", "bfloat16", "nf4"};

inline constexpr const char* kLoraA = ".lora_A";
inline constexpr const char* kLoraB = ".lora_B";
/// Behind a weight's name, in a base in NF4: the scales of its blocks (nn/linear.h).
inline constexpr std::array kNf4Scales = {"_absmax", "_nested"};

/// Whether a parameter belongs to an adapter.
bool is_lora_name(const std::string& parameter);

/// The names of the layers whose weights a base in NF4 stores in 4 bits: every linear layer of the blocks, with an
/// adapter or not. Embeddings, norms and the output layer are in bfloat16 then. None for another base.
std::vector<std::string> nf4_layers(const LlamaConfig& config, const LoraOptions& options);

/// ConfigError, unless so many ranks of tensor parallelism can share the rows of a base in NF4 in whole blocks, or the
/// base is another.
void check_nf4_cuts(const LlamaConfig& config, const LoraOptions& options, std::int64_t tensor_parallel_size);

/// At least so many bytes hold the weights of a model: one for each; half of one in NF4,
/// and of GPT-OSS, whose files are in MXFP4.
std::int64_t least_bytes(const LlamaConfig& config, const LoraOptions& options);

/// The names of the layers with adapters, in the model's order; none if the rank is 0. ConfigError that begins with
/// `what` for a target that matches no layer, for wrong numbers, and for some of the layers that are one in files. Also
/// for a base that cannot be stored so: experts in another type than float32, rows that are no whole blocks in NF4.
std::vector<std::string> lora_layers(const LlamaConfig& config, const LoraOptions& options,
                                     const std::string& what = "[lora]");

}  // namespace phalanx::models
