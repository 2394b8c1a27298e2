// Reads model.safetensors.index.json, the index of weights that are spread over several files:
//
//   {"metadata": {...}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors", ...}}
//
//   const auto file_of = parse_weight_index(path, read_file(path, kMaxWeightIndexBytes));
//   for (const auto& [tensor, file] : file_of) use(tensor, file);
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

/// Throws CheckpointError if a directory holds more than one model, so that a reader would have to choose: an index of
/// other files beside model.safetensors, or an adapter (PEFT) beside the model that it changes.
void require_one_model(const std::filesystem::path& folder);

/// Returns the name of the file that holds each tensor; at least one. An index comes from elsewhere, so a name that
/// leads out of its directory is refused. So is everything else that is not of this form. The CheckpointError begins
/// with `file`.
std::map<std::string, std::string> parse_weight_index(const std::string& file, std::string_view text);

}  // namespace phalanx
