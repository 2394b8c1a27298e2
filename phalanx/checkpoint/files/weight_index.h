// model.safetensors.index.json, the index of weights that are spread over several files:
//
//   {"metadata": {...}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors", ...}}
//
//   for (const auto& [tensor, file] : parse_weight_index(path, read_file(path, kMaxWeightIndexBytes))) ...
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

namespace phalanx {

inline constexpr std::uint64_t kMaxWeightIndexBytes = 256 << 20;
inline constexpr const char* kWeightIndexName = "model.safetensors.index.json";
inline constexpr const char* kSingleWeightsName = "model.safetensors";

/// CheckpointError where a directory holds more than one model, of which a reader would have to choose one: an index of
/// other files beside model.safetensors, or an adapter (PEFT) beside the model that it changes.
void require_one_model(const std::filesystem::path& folder);

/// The name of the file that each tensor is in; one at least. An index comes from elsewhere: a name that leads out of
/// its directory is refused, as is all else that is not of this form, by a CheckpointError that begins with `file`.
std::map<std::string, std::string> parse_weight_index(const std::string& file, std::string_view text);

}  // namespace phalanx
