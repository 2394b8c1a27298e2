// The families of models that Llama (models/llama.h) can be,
// and what their layers have in place of Llama's. Torch-free.
//
//   traits_of(LlamaFamily::olmo2).norms;          // NormPlacement::after
//
// A family that combines these forms in a new way is one row of the table in model_family.cc,
// and one of hf_families.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/models/config/layer_forms.h"

namespace phalanx::models {

/// Hugging Face's model_type.
enum class LlamaFamily : std::uint8_t {
  llama,
  mistral,
  qwen2,
  qwen3,
  gpt2,
  mixtral,
  qwen3_moe,
  olmo2,
  smollm3,
  phi3,
  gemma3_text,
  deepseek_v2,
  deepseek_v3,
  gpt_oss,
  granite
};

struct FamilyTraits {
  LlamaFamily family;
  const char* name;
  bool window = false;         // a sliding window is allowed
  bool qkv_bias = false;       // of queries, keys and values
  bool output_bias = false;    // of the projection behind attention
  bool expert_biases = false;  // of the experts' projections, and of the router
  bool sinks = false;          // one more score for each query head: kernels/attention_sinks.h
  QkNorm qk_norm = QkNorm::none;
  NormPlacement norms = NormPlacement::before;
  GatedActivation activation = GatedActivation::silu;
  bool norms_add_one = false;       // norms multiply by 1 + weight
  bool scales_embeddings = false;   // by sqrt(dim)
  bool experts = false;             // in place of the feed-forward net
  bool some_unrotated = false;      // single layers may be without a rotary embedding
  bool partial_rotation = false;    // a part of a head may stay as it is
  bool layers_have_thetas = false;  // layers with a window have a rotary base of their own
  bool scales_queries = false;      // scores may be scaled by another number than sqrt(head_dim)
  bool multipliers = false;         // of embeddings, layers' results, scores and logits
  bool latent_attention = false;    // nn/latent_attention.h; first layers may have no experts, others a net beside them
  RouterForm router = RouterForm::softmax;
  /// Every so many layers one is without a rotary embedding, if `some_unrotated`, or else without the window; 0: none.
  int layer_period = 0;
};

const FamilyTraits& traits_of(LlamaFamily family) noexcept;
const char* family_name(LlamaFamily family);
/// Returns "llama, mistral, qwen2, ...".
std::string family_names();
std::optional<LlamaFamily> family_from_name(std::string_view name);
std::vector<LlamaFamily> all_families();

}  // namespace phalanx::models
