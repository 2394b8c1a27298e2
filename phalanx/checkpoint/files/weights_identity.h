// Which weights these are, told from what they contain and never from where they lie or when they were written: for
// state that may only go on with the same ones. A copy of a model, or one that was moved, is the same model.
//
//   weights_identity("outputs/checkpoint/step-200")   {"step": 200, "bytes": 123456, "hash": "9a0f..."}
//   weights_identity("Llama-3.2-1B")                  {"bytes": 2471645608, "hash": "17c2..."}
//
// Of a step directory: the hashes of its manifest, which are of every byte. Of safetensors files: their headers, and
// every byte of files of up to 64 MiB; of larger ones eight samples of 4 KiB from each tensor, so that what has been
// trained, merged or converted since differs. Reads no more than that. Knows no torch tensor.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>

namespace phalanx {

/// `path`: a step directory, a directory of safetensors files (those of its index, else model.safetensors, else all),
/// or one such file. CheckpointError where there are no weights.
nlohmann::json weights_identity(const std::filesystem::path& path);

}  // namespace phalanx
