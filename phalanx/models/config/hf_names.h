// Maps parameters to their names and places in Hugging Face's files. Torch-free.
//
//   hf_tensor_view(config, "layers.0.attention.wq.weight").name;     // model.layers.0.self_attn.q_proj.weight
//   hf_tensor_view(gpt2, "layers.0.attention.wk.weight");            // transformer.h.0.attn.c_attn.weight, transposed,
//                                                                    // part 1 of 3 (counted from 0)
//
// The values need no permutation: the rotary pairing is Hugging Face's.
#pragma once

#include <string>

#include "phalanx/layout/file_tensor_view.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// Depends on the model's family. Throws Error for an unknown name.
FileTensorView hf_tensor_view(const LlamaConfig& config, const std::string& fqn);

/// The name prefix that is missing in files that hold only a family's base model: "transformer." for GPT-2.
std::string hf_optional_prefix(const LlamaConfig& config);

/// Whether a Hugging Face file may hold this tensor in addition to the parameters: a value that a model computes
/// itself, or a second copy of the output matrix of tied embeddings.
bool hf_may_ignore(const LlamaConfig& config, const std::string& hf_name);

/// Maps our name to Hugging Face's ("model.layers.0.self_attn.q_proj.weight") and back. For all families but GPT-2.
std::string llama_hf_name(const std::string& fqn);
std::string llama_fqn_from_hf(const std::string& hf_name);

}  // namespace phalanx::models
