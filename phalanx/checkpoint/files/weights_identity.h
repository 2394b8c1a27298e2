// Identifies weights by their content, never by where they are stored or when they were written. It is for state that
// may only be resumed with the same weights. A copied or moved model is the same model.
//
//   weights_identity("outputs/checkpoint/step-200")   {"step": 200, "bytes": 123456, "hash": "9a0f..."}
//   weights_identity("Llama-3.2-1B")                  {"bytes": 2471645608, "hash": "17c2..."}
//
// For a step directory it hashes the hashes of the manifest, which cover every byte. For safetensors files it hashes
// their headers, and every byte of files of up to 64 MiB. Of larger files it hashes eight samples of 4 KiB from each
// tensor, so that weights that were trained, merged or converted since differ. It reads no more than that. It does not
// use torch.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>

namespace phalanx {

/// `path`: a step directory, a directory of safetensors files (those of its index, else model.safetensors, else all),
/// or one such file. Throws CheckpointError if there are no weights.
nlohmann::json weights_identity(const std::filesystem::path& path);

}  // namespace phalanx
