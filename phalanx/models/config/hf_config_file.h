// A config.json while it is read: its keys, and errors that name it. Torch-free.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/models/config/json_reader.h"

namespace phalanx::models {

struct HfConfigFile {
  const nlohmann::json& json;
  const std::string file;
  const JsonReader read{json, file};

  bool has(const char* key) const { return read.has(key); }
  /// Both throw a CheckpointError.
  [[noreturn]] void refuse(const std::string& what, const std::string& expected) const;
  [[noreturn]] void fail(const std::string& what) const;
  /// The layers that "layer_types" calls "full_attention", ascending; the others have the window.
  std::vector<std::int64_t> full_layers(std::int64_t n_layers) const;
};

}  // namespace phalanx::models
