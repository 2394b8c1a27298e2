// Whether saved weights come with the biases by which experts are chosen (models/expert_bias.h).
#pragma once

#include <filesystem>

namespace phalanx {

/// `path`: as of load_weights(). Only a checkpoint of Phalanx has a place for them.
bool holds_expert_biases(const std::filesystem::path& path);

}  // namespace phalanx
