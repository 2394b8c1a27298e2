// Makes the text files that Hugging Face's tools read beside a model's weights: config.json, generation_config.json,
// the tokenizer's files. In each of them a reader finds the tokens that begin a text, end it and pad a batch. They are
// those of the source's files if there are any, else the tokenizer's, else an explicit null. (transformers would
// replace a missing entry by a default of the family, a token of some other vocabulary.)
//
//   for (const auto& [name, text] : hf_files(config, "bfloat16", "Llama-3.2-1B")) replace_file(folder / name, text);
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "phalanx/models/config/llama_config.h"

namespace phalanx {

/// Returns the texts, by name, of the tokenizer's and the generation's files in `folder` (or beside the tokenizer.json
/// that it names): the files of a model's directory other than weights and config.json. Empty if there is no such
/// folder.
std::map<std::string, std::string> hf_assets(const std::filesystem::path& folder);

/// Warns if in the texts of hf_files() the token that ends a text is not the one that ended the documents of the
/// model's training data. `metadata`: the checkpoint's; may be empty.
void compare_end_tokens(const std::map<std::string, std::string>& texts, const std::string& metadata);

/// Returns all texts, by name. Warns if there is no tokenizer or no token that ends a text. `dtype` is torch's name of
/// the weights' type. `assets` is the source's folder, or the tokenizer's (empty: neither). Throws CheckpointError or
/// DataError if a file there is malformed. A tokenizer that is not supported is copied, with a warning.
std::map<std::string, std::string> hf_files(const models::LlamaConfig& config, const std::string& dtype,
                                            const std::filesystem::path& assets);

}  // namespace phalanx
