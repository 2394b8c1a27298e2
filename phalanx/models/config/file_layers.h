// Which linear layers are one matrix in Hugging Face's files: queries, keys and values of GPT-2 (c_attn) and of Phi-3
// (qkv_proj), gate and up of Phi-3 (gate_up_proj). Torch-free.
//
//   file_layers(phi3, {"layers.0.attention.wq", "layers.0.attention.wk", "layers.0.attention.wv"});
//   // {"model.layers.0.self_attn.qkv_proj", those three}
#pragma once

#include <array>
#include <string>
#include <vector>

#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {

struct FileLayer {
  std::string name;               // in the files
  std::vector<std::string> ours;  // its parts, in the order of its rows

  bool operator==(const FileLayer&) const = default;
};

/// The last names of layers that are several of ours.
inline constexpr std::array kJoinedLayers = {"c_attn", "qkv_proj", "gate_up_proj"};

/// The name in the files of a layer of ours: "layers.0.attention.wq" -> "model.layers.0.self_attn.q_proj".
std::string file_layer_name(const LlamaConfig& config, const std::string& layer);

/// The files' layers of which `layers` are the parts, in the order in which they are first named. Throws Error if some,
/// but not all, of a layer's parts are among them.
std::vector<FileLayer> file_layers(const LlamaConfig& config, const std::vector<std::string>& layers);

}  // namespace phalanx::models
