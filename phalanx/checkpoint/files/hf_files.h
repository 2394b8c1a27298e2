// The text files of a model's directory that Hugging Face's tools read, beside its weights: config.json,
// generation_config.json, the tokenizer's files. Every reader of them finds the tokens that begin a text, end it and
// fill up a batch: those of the source's files where there are any, else the tokenizer's, else an explicit null (what
// is left out, transformers replaces by a default of the family, some token of another vocabulary).
//
//   for (const auto& [name, text] : hf_files(config, "bfloat16", "Llama-3.2-1B")) replace_file(folder / name, text);
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "phalanx/models/config/llama_config.h"

namespace phalanx {

/// What belongs to a model's directory beside weights and config.json, by name: the texts of the tokenizer's and the
/// generation's files that are in `folder` (or beside the tokenizer.json that it names). None where there is no such
/// folder.
std::map<std::string, std::string> hf_assets(const std::filesystem::path& folder);

/// A warning where the texts of hf_files() say that a text ends by another token than the documents that the model was
/// trained on. `metadata`: the checkpoint's; may be empty.
void compare_end_tokens(const std::map<std::string, std::string>& texts, const std::string& metadata);

/// All texts, by name, with a warning where there is no tokenizer or no token that ends a text. `dtype` is torch's name
/// of the weights' type; `assets` the source's folder, or that of the tokenizer (empty: neither). CheckpointError or
/// DataError where a file there is malformed; a tokenizer that is not supported is copied, with a warning.
std::map<std::string, std::string> hf_files(const models::LlamaConfig& config, const std::string& dtype,
                                            const std::filesystem::path& assets);

}  // namespace phalanx
