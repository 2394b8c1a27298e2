// Model weights as others keep them: one safetensors file, or a Hugging Face directory of several with an index.
//
// Loading copies into live tensors, converts dtypes (a bf16 release into f32 parameters), and needs a map only where
// the file's tensors differ from the model's: in their names, transposed, several of the model's in one of the file's.
// Names and shapes are all compared before the first tensor is touched.
//
//   load_weights("Llama-3.2-1B", parameters, hf_weights(config));                         // hf_weights.h
//   export_weights("out/model.safetensors", parameters, {.dtype = at::kBFloat16});
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

/// From a tensor's name to its place in a file.
using KeyMapping = std::function<FileTensorView(const std::string&)>;

struct LoadWeightsOptions {
  KeyMapping key_mapping;       // unset: under the tensor's own name
  std::string optional_prefix;  // of names in the file, which may lack it
  /// Names in the file, with the optional prefix, that may stay unread, such as buffers that the model computes itself;
  /// unset: none. LoadedWeights says which did.
  std::function<bool(const std::string&)> ignore;
  /// Names, likewise, that stay unread because another rank has that part of the model; unset: none.
  std::function<bool(const std::string&)> elsewhere;
  /// Of a tensor's name: another name in the file under which its values may be once more, such as the output matrix of
  /// tied embeddings. CheckpointError where the values there are others.
  std::function<std::string(const std::string&)> copy_in_file;
};

struct LoadedWeights {
  std::vector<std::filesystem::path> files;
  std::uint64_t bytes = 0;
  std::vector<std::string> ignored;  // names in the files, in their order
};

/// `path`: a .safetensors file; or a directory that holds model.safetensors.index.json (its files must lie in the
/// directory itself), or else model.safetensors, or else exactly one .safetensors file; or a step directory of a
/// Phalanx checkpoint, whose "model." tensors are taken (under the tensors' own names, no map). CheckpointError
/// otherwise. A tensor with a shard takes its rank's box alone, and reads no more than that (of a copy, too).
LoadedWeights load_weights(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                           const LoadWeightsOptions& options = {});

/// "model.layers.*.rotary_emb.inv_freq (32), lm_head.weight": names for one line, those that differ in numbers
/// together.
std::string brief_names(const std::vector<std::string>& names);

struct ExportWeightsOptions {
  KeyMapping key_mapping;
  std::optional<at::ScalarType> dtype;          // of floating-point tensors; unset: as they are
  std::map<std::string, std::string> metadata;  // beside {"format": "pt"}
  std::uint64_t max_file_bytes = 0;             // of export_weights_to_folder(); 0: one file
};

/// Writes one safetensors file that Python reads, each of its tensors in whole (CheckpointError if parts are missing);
/// it appears under `path` only when whole and on the disk.
void export_weights(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                    const ExportWeightsOptions& options, FileSystem& files);

/// The same into `folder`: model.safetensors or, where that would be larger than max_file_bytes, as many files as it
/// takes (a larger tensor has one of its own) and model.safetensors.index.json. Such files that are there already give
/// way when the new ones are whole. Returns the paths, the index last.
std::vector<std::filesystem::path> export_weights_to_folder(const std::filesystem::path& folder,
                                                            const std::vector<NamedTensor>& tensors,
                                                            const ExportWeightsOptions& options, FileSystem& files);

}  // namespace phalanx
