#include "phalanx/models/config/file_layers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "phalanx/base/error.h"
#include "phalanx/models/config/hf_names.h"

namespace phalanx::models {

std::string file_layer_name(const LlamaConfig& config, const std::string& layer) {
  constexpr std::string_view kEnd = ".weight";
  std::string name = hf_tensor_view(config, layer + std::string(kEnd)).name;
  name.resize(name.size() - kEnd.size());
  return name;
}

std::vector<FileLayer> file_layers(const LlamaConfig& config, const std::vector<std::string>& layers) {
  std::vector<FileLayer> result;
  for (const std::string& layer : layers) {
    const std::string name = file_layer_name(config, layer);
    const auto found = std::ranges::find(result, name, &FileLayer::name);
    if (found == result.end()) {
      result.push_back({name, {layer}});
    } else {
      found->ours.push_back(layer);
    }
  }
  for (FileLayer& layer : result) {
    const auto form = [&](const std::string& ours) { return hf_tensor_view(config, ours + ".weight").form; };
    std::ranges::sort(layer.ours, {}, [&](const std::string& ours) { return form(ours).part; });
    std::int64_t found = 0;
    for (const std::string& ours : layer.ours) found += form(ours).span;
    const std::int64_t expected = form(layer.ours.front()).parts;
    if (found == expected) continue;
    throw Error(
        fmt::format("of {} there is only {}: expected all of its parts", layer.name, fmt::join(layer.ours, ", ")));
  }
  return result;
}

}  // namespace phalanx::models
