// Writes a checkpoint again in another form, tensor after tensor through a small buffer: memory does not grow with it.
//
// - consolidate(): plain safetensors files that any reader of that format takes, each tensor whole, without shards and
//   manifest: one file, or several with the index that Hugging Face's tools expect. What the checkpoint says of its
//   model goes into each header (weights_description.h), so that weights keep it.
// - reshard(): a checkpoint of as many files as wanted, each with even parts of the rows; the same state.
//
// Every byte read is verified (DamagedError). The result appears under its name when it is whole and on the disk; an
// existing one is never overwritten (CheckpointError). A failure leaves nothing behind.
//
//   SavedState saved("run/checkpoint/step-100");
//   consolidate(saved, "llama.safetensors", {.dtype = safetensors::Dtype::bf16});
//   reshard(saved, "other/checkpoint", {.files = 8});                        // other/checkpoint/step-100
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/layout/file_tensor_view.h"

namespace phalanx {

struct ConsolidateOptions {
  bool all = false;                         // every tensor under its whole name; else the model's, without "model."
  std::optional<safetensors::Dtype> dtype;  // of floating-point tensors: F64, F32, F16 or BF16; unset: as saved
  std::uint64_t max_file_bytes = 0;         // 0: one file. A larger tensor has a file of its own
  std::function<FileTensorView(const std::string&)> key_mapping;       // unset: as above
  std::map<std::string, std::string> beside;                           // text files of the same directory, by name
  bool allow_tokenizer_mismatch = false;                               // consolidate_for_hf() alone
  std::function<void(std::uint64_t)> progress = [](std::uint64_t) {};  // bytes written
};

struct WrittenFiles {
  std::vector<std::filesystem::path> files;
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;
};

/// What the tensors will take in the files, without headers.
std::uint64_t consolidated_bytes(const SavedState& saved, const ConsolidateOptions& options);

/// `out` ends in .safetensors: that file. Else a directory that is not there yet, or is empty: model.safetensors in it,
/// or, with max_file_bytes, model-00001-of-00003.safetensors, ... and model.safetensors.index.json.
WrittenFiles consolidate(SavedState& saved, const std::filesystem::path& out, const ConsolidateOptions& options = {},
                         FileSystem& fs = posix_file_system());

struct ReshardOptions {
  int files = 1;
  std::function<void(std::uint64_t)> progress = [](std::uint64_t) {};
};

/// Writes the step directory `folder`/step-N of the state's step N.
WrittenFiles reshard(SavedState& saved, const std::filesystem::path& folder, const ReshardOptions& options = {},
                     FileSystem& fs = posix_file_system());

}  // namespace phalanx
