// Loads and exports model weights in the formats of other programs: one safetensors file, or a Hugging Face directory
// of several files with an index.
//
// Loading copies into live tensors and converts dtypes (a bf16 release into f32 parameters). It needs a key mapping
// only if the file's tensors differ from the model's: in their names, transposed, or with several of the model's
// tensors in one of the file's. All names and shapes are compared before the first tensor is changed.
//
//   load_weights("Llama-3.2-1B", parameters, hf_weights(config));                        // hf_weights.h
//   export_weights("out/model.safetensors", parameters, {.dtype = at::kBFloat16}, posix_file_system());
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/layout/file_tensor_view.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

/// Maps a tensor's name to its view in a file.
using KeyMapping = std::function<FileTensorView(const std::string&)>;

struct LoadWeightsOptions {
  KeyMapping key_mapping;       // unset: the tensor's own name
  std::string optional_prefix;  // of names in the file; the file may lack it
  /// Which names in the file (with the optional prefix) may stay unread, such as buffers that the model computes
  /// itself. Unset: none. LoadedWeights lists those that did.
  std::function<bool(const std::string&)> ignore;
  /// Likewise, which names stay unread because another rank has that part of the model. Unset: none.
  std::function<bool(const std::string&)> elsewhere;
  /// For a tensor's name: another name in the file that may hold a second copy of its values, such as the output matrix
  /// of tied embeddings. Throws CheckpointError if the values there differ.
  std::function<std::string(const std::string&)> copy_in_file;
  /// For the name of a matrix in the file that is saved in 8 bits (F8_E4M3): the name of its scales, fp32 [rows / 128,
  /// columns / 128] rounded up, by which its blocks of 128 x 128 are multiplied. Without them it is refused, and where
  /// it is transposed or a part of another tensor. Unset: such matrices have none.
  std::function<std::string(const std::string&)> scales_in_file;
  /// A matrix that is not there may be in MXFP4 (files/mxfp4.h), under its name with these two endings.
  bool reads_mxfp4 = false;
};

inline constexpr const char *kMxfp4Blocks = "_blocks", *kMxfp4Scales = "_scales";

struct LoadedWeights {
  std::vector<std::filesystem::path> files;
  std::uint64_t bytes = 0;
  std::vector<std::string> ignored;  // names in the files, in their order
};

/// `path` is one of:
/// - a .safetensors file;
/// - a directory with model.safetensors.index.json (whose files must be in that directory), or else with
///   model.safetensors, or else with exactly one .safetensors file;
/// - a step directory of a Phalanx checkpoint, whose "model." tensors are read (under the tensors' own names, no map).
/// Throws CheckpointError otherwise. A tensor with a shard reads only its rank's box (also of a copy).
LoadedWeights load_weights(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                           const LoadWeightsOptions& options = {});

/// "model.layers.*.rotary_emb.inv_freq (32), lm_head.weight": names for one line; names that differ only in numbers are
/// joined.
std::string brief_names(const std::vector<std::string>& names);

struct ExportWeightsOptions {
  KeyMapping key_mapping;
  std::optional<at::ScalarType> dtype;          // of floating-point tensors but biases of experts; unset: as they are
  std::map<std::string, std::string> metadata;  // in addition to {"format": "pt"}
  std::uint64_t max_file_bytes = 0;             // for export_weights_to_folder(); 0: one file
};

/// Writes one safetensors file that Python can read, with each tensor complete (CheckpointError if parts are missing).
/// ENSURES: the file appears under `path` only when it is complete and on disk.
void export_weights(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                    const ExportWeightsOptions& options, FileSystem& files);

/// The same into `folder`: model.safetensors or, if that would be larger than max_file_bytes, as many files as needed
/// (a larger tensor has its own file) and model.safetensors.index.json. Existing files of these names are replaced when
/// the new ones are complete. Returns the paths, the index last.
std::vector<std::filesystem::path> export_weights_to_folder(const std::filesystem::path& folder,
                                                            const std::vector<NamedTensor>& tensors,
                                                            const ExportWeightsOptions& options, FileSystem& files);

}  // namespace phalanx
