// Where the parameters of a model lie in Hugging Face's files. Knows no tensor.
//
//   hf_tensor_view(config, "layers.0.attention.wq.weight").name;     // model.layers.0.self_attn.q_proj.weight
//   hf_tensor_view(gpt2, "layers.0.attention.wk.weight");            // transformer.h.0.attn.c_attn.weight, turned, 1 of 3
//
// The values need no permutation: the rotary pairing is Hugging Face's.
#pragma once

#include <string>

#include "phalanx/layout/file_tensor_view.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// By the model's family. An unknown name is an Error.
FileTensorView hf_tensor_view(const LlamaConfig& config, const std::string& fqn);

/// What the names of a family's base model lack, in files that hold no more than that: "transformer." of GPT-2.
std::string hf_optional_prefix(const LlamaConfig& config);

/// Whether a file of Hugging Face's may hold this tensor beside the parameters: what a model computes by itself, or the
/// output matrix of tied embeddings once more.
bool hf_may_ignore(const LlamaConfig& config, const std::string& hf_name);

/// Of all families but GPT-2 a place is a name ("model.layers.0.self_attn.q_proj.weight"); and back.
std::string llama_hf_name(const std::string& fqn);
std::string llama_fqn_from_hf(const std::string& hf_name);

}  // namespace phalanx::models
