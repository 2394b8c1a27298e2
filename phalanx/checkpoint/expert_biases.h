// Whether saved weights come with the biases by which experts are chosen (models/expert_bias.h).
#pragma once

#include <filesystem>

namespace phalanx {

/// `path`: as of load_weights(). Other files have a place for them only in families
/// whose weights they are a part of (LlamaConfig::has_expert_biases()), and are not looked at.
bool holds_expert_biases(const std::filesystem::path& path);

}  // namespace phalanx
