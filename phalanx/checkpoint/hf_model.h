// A checkpoint of a language model as the directory that Hugging Face's tools read: model.safetensors, or several files
// with their index, under the names of transformers' class of its family, config.json, and the tokenizer's files where
// the checkpoint's run had them.
//
//   SavedState saved("run/checkpoint/step-100");
//   consolidate_for_hf(saved, "llama-hf", {.dtype = safetensors::Dtype::bf16});
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/rewrite.h"

namespace phalanx {

/// What else belongs to a model's directory, by name: the texts of the tokenizer's and the generation's files that are
/// in `folder` (or beside the tokenizer.json that it names). None where there is no such folder.
std::map<std::string, std::string> hf_assets(const std::filesystem::path& folder);

/// consolidate() with that in the new directory `folder`. The model's shape is the manifest's (metadata.model);
/// CheckpointError if it is not there, is not of a known family, or is not that of the tensors.
WrittenFiles consolidate_for_hf(SavedState& saved, const std::filesystem::path& folder, ConsolidateOptions options = {},
                                FileSystem& fs = posix_file_system());

}  // namespace phalanx
