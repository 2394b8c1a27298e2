#include "phalanx/models/config/frozen_parameters.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/base/name_patterns.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::models {

std::vector<std::string> frozen_parameters(const LlamaConfig& config, const std::vector<std::string>& patterns,
                                           const LoraOptions& lora) {
  const std::vector<std::string> adapted = lora_layers(config, lora);
  if (patterns.empty() && adapted.empty()) return {};
  std::vector<std::string> names, frozen;
  for (const auto& [name, shape] : llama_parameter_shapes(config)) names.push_back(name);
  for (const std::string& layer : adapted) {
    for (const char* half : {kLoraA, kLoraB}) names.push_back(layer + half);
  }
  for (const std::string& layer : nf4_layers(config, lora)) {
    for (const char* scales : kNf4Scales) names.push_back(fmt::format("{}.weight{}", layer, scales));
  }
  const std::vector<bool> matched = matching_names("[training] frozen", patterns, names);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (matched[i] || (!adapted.empty() && !is_lora_name(names[i]))) frozen.push_back(names[i]);
  }
  if (frozen.size() == names.size()) {
    throw ConfigError(
        fmt::format("[training] frozen matches all of the {} parameters that could be trained: nothing is left to "
                    "train; expected patterns that leave out at least one",
                    adapted.empty() ? names.size() : 2 * adapted.size()));
  }
  return frozen;
}

}  // namespace phalanx::models
