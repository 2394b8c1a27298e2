// A checkpoint of a language model as the directory that Hugging Face's tools read: model.safetensors, or several files
// with their index, under the names of transformers' class of its family, and what stands beside them (hf_files.h).
//
//   SavedState saved("run/checkpoint/step-100");
//   consolidate_for_hf(saved, "llama-hf", {.dtype = safetensors::Dtype::bf16});
#pragma once

#include <filesystem>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/rewrite.h"

namespace phalanx {

/// consolidate() with that in the new directory `folder`. The model's shape is the manifest's (metadata.model);
/// CheckpointError if it is not there, is not of a known family, or is not that of the tensors. `assets`: of the
/// tokenizer's files; empty: where the run had them, or a warning where they are gone; CheckpointError if that is
/// another tokenizer than the manifest names, unless the options allow it.
WrittenFiles consolidate_for_hf(SavedState& saved, const std::filesystem::path& folder, ConsolidateOptions options = {},
                                const std::filesystem::path& assets = {}, FileSystem& fs = posix_file_system());

}  // namespace phalanx
