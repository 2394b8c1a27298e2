// A checkpoint of a Llama as the directory that Hugging Face's tools read: model.safetensors, or several files with
// their index, under the names of LlamaForCausalLM, and config.json.
//
//   SavedState saved("run/checkpoint/step-100");
//   consolidate_for_hf(saved, "llama-hf", {.dtype = safetensors::Dtype::bf16});
#pragma once

#include <filesystem>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/rewrite.h"

namespace phalanx {

/// consolidate() with that in the new directory `folder`. The model's shape is the manifest's (metadata.model);
/// CheckpointError if it is not there, is not a Llama's, or is not that of the tensors.
WrittenFiles consolidate_for_hf(SavedState& saved, const std::filesystem::path& folder, ConsolidateOptions options = {},
                                FileSystem& fs = posix_file_system());

}  // namespace phalanx
