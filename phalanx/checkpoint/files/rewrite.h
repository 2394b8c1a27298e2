// Rewrites a checkpoint in another form, one tensor after another through a small buffer. The memory it needs does not
// grow with the checkpoint.
//
// - consolidate(): plain safetensors files for any reader of that format, each tensor complete, without shards and
//   manifest. It writes one file, or several with the index that Hugging Face's tools expect. The checkpoint's
//   description of its model goes into each header (weights_description.h).
// - reshard(): a checkpoint of any number of files, each with even parts of the rows; the same state.
//
// Every byte read is verified (DamagedError). The result appears under its name when it is complete and on disk. An
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
  bool all = false;                         // every tensor under its full name; else the model's, without "model."
  std::optional<safetensors::Dtype> dtype;  // of floating-point tensors: F64, F32, F16 or BF16; unset: as saved
  std::uint64_t max_file_bytes = 0;         // 0: one file. A larger tensor has its own file
  std::function<FileTensorView(const std::string&)> key_mapping;       // unset: the names that `all` gives
  std::map<std::string, std::string> beside;                           // text files for the same directory, by name
  bool allow_tokenizer_mismatch = false;                               // only for consolidate_for_hf()
  std::function<void(std::uint64_t)> progress = [](std::uint64_t) {};  // bytes written
};

struct WrittenFiles {
  std::vector<std::filesystem::path> files;
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;
};

/// The bytes of the tensors in the files, without headers.
std::uint64_t consolidated_bytes(const SavedState& saved, const ConsolidateOptions& options);

/// If `out` ends in .safetensors, it is the file. Else it is a directory that does not exist yet, or is empty. It gets
/// model.safetensors or, with max_file_bytes, model-00001-of-00003.safetensors, ... and model.safetensors.index.json.
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
