// Writes a checkpoint of a language model as a directory that Hugging Face's tools can read. It holds
// model.safetensors, or several files with their index, under the names that transformers' class of the model's family
// uses, and the files that accompany them (hf_files.h).
//
//   SavedState saved("run/checkpoint/step-100");
//   consolidate_for_hf(saved, "llama-hf", {.dtype = safetensors::Dtype::bf16});
#pragma once

#include <filesystem>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/rewrite.h"

namespace phalanx {

/// Runs consolidate() into the new directory `folder`. The model's shape is the manifest's (metadata.model). Throws
/// CheckpointError if that is missing, is of an unknown family, or does not fit the tensors. `assets`: the folder of
/// the tokenizer's files; empty: where the run had them, with a warning if they are gone. Throws CheckpointError if
/// that tokenizer is not the one that the manifest names, unless the options allow it.
WrittenFiles consolidate_for_hf(SavedState& saved, const std::filesystem::path& folder, ConsolidateOptions options = {},
                                const std::filesystem::path& assets = {}, FileSystem& fs = posix_file_system());

}  // namespace phalanx
