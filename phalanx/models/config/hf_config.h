// Reads and writes Hugging Face's config.json for the Llama family. Torch-free.
//
//   const LlamaConfig config = llama_config_from_hf(read_file(path), path);
//   write(folder / "config.json", llama_hf_config(config, "float32"));
//
// - Accepted model_type: those of LlamaFamily (model_family.h).
// - Rotary settings are read from rope_theta and rope_scaling or, as in newer files, from rope_parameters, of type
//   default, linear, dynamic, llama3, yarn or longrope.
// - A missing setting has transformers' default.
// - A setting that changes the model's results and is not supported is refused by name. hf_unsupported.h reports other
//   keys that are not honoured.
// - Two keys with the same meaning must agree.
//
// A malformed file, a missing or mistyped key, and numbers from which no model can be built throw a CheckpointError
// that names the file and the key.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

/// The largest file size that a reader should accept.
inline constexpr std::uint64_t kMaxHfConfigBytes = 16 << 20;

/// Parses the text of config.json. `file` begins the error messages.
LlamaConfig llama_config_from_hf(const std::string& text, const std::string& file);

/// For example "LlamaForCausalLM": the class of transformers that reads it.
const char* hf_architecture(LlamaFamily family);

/// The tokens that end a text, from "eos_token_id" of config.json or generation_config.json: one, several or none.
std::vector<std::int64_t> hf_end_tokens(const std::string& text, const std::string& file);

/// The same of a model's folder: those of generation_config.json, else of config.json; none where neither
/// says any. A model that was trained for chats ends its turn with another token than its texts, and the
/// first of the files names it.
std::vector<std::int64_t> hf_end_tokens_in(const std::filesystem::path& folder);

/// Returns the text of a config.json that transformers reads as the same model. `dtype` is torch's name of the weights'
/// dtype.
std::string llama_hf_config(const LlamaConfig& config, const std::string& dtype);

}  // namespace phalanx::models
