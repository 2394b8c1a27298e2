// Hugging Face's config.json of the Llama family and its kin, and the end of a text. Knows no tensor.
//
//   const LlamaConfig config = llama_config_from_hf(read_file(path), path);
//   write(folder / "config.json", llama_hf_config(config, "float32"));
//
// Read: model_type llama, mistral, qwen2, qwen3, gpt2, mixtral; rotary settings as rope_theta and rope_scaling or, as
// newer files have them, in rope_parameters, of type default, linear, dynamic or llama3. What is not said has
// transformers' default.
// What changes the model's results and cannot be done here is refused by name; of other keys that are not honoured
// hf_unsupported.h tells. Two keys that say the same thing must agree.
//
// A malformed file, a missing or mistyped key, and numbers of which no model can be built are a CheckpointError that
// names the file and the key.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// What a reader of the file should take at most.
inline constexpr std::uint64_t kMaxHfConfigBytes = 16 << 20;

/// From the text of config.json; `file` begins the messages.
LlamaConfig llama_config_from_hf(const std::string& text, const std::string& file);

/// "LlamaForCausalLM": the class of transformers that reads it.
const char* hf_architecture(LlamaFamily family);

/// The tokens that end a text, as config.json or generation_config.json says in "eos_token_id": one, several, none.
std::vector<std::int64_t> hf_end_tokens(const std::string& text, const std::string& file);

/// The text of config.json that transformers reads as the same model; `dtype` is torch's name of the weights' type.
std::string llama_hf_config(const LlamaConfig& config, const std::string& dtype);

}  // namespace phalanx::models
