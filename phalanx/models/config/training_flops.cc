#include "phalanx/models/config/training_flops.h"

#include <algorithm>
#include <map>
#include <set>

#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/config/parameter_kinds.h"

namespace phalanx::models {
namespace {

using Sizes = std::map<std::string, std::int64_t>;

/// Elements of all parameters, by name.
Sizes sizes_of(const LlamaConfig& config, const LoraOptions& lora) {
  Sizes sizes;
  const auto shapes = llama_parameter_shapes(config);
  for (const auto& [name, shape] : shapes) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    sizes[name] = count;
  }
  for (const std::string& layer : lora_layers(config, lora)) {
    const std::vector<std::int64_t>& shape = shapes.at(layer + ".weight");
    sizes[layer + kLoraA] = lora.rank * shape[1];
    sizes[layer + kLoraB] = shape[0] * lora.rank;
  }
  return sizes;
}

/// The share of tokens that go through a parameter's product.
double share_of_tokens(const LlamaConfig& config, const std::string& name) {
  if (name == "pos_embeddings.weight" || (name == "tok_embeddings.weight" && !config.tie_embeddings)) return 0;
  if (!is_expert_parameter(name)) return 1;
  return static_cast<double>(config.experts_per_token) / static_cast<double>(config.experts);
}

/// -1 in front of the first layer; n_layers behind the last.
std::int64_t layer_of(const LlamaConfig& config, const std::string& name) {
  constexpr std::string_view kLayers = "layers.";
  if (name.starts_with(kLayers)) return std::stoll(name.substr(kLayers.size()));
  return name.find("embeddings") != std::string::npos ? -1 : config.n_layers;
}

}  // namespace

TrainingFlops training_flops(const LlamaConfig& config, const std::vector<std::string>& frozen,
                             const LoraOptions& lora) {
  const Sizes sizes = sizes_of(config, lora);
  const std::set<std::string> kept(frozen.begin(), frozen.end());
  std::int64_t first_trained = config.n_layers;
  for (const auto& [name, size] : sizes) {
    if (!kept.contains(name)) first_trained = std::min(first_trained, layer_of(config, name));
  }
  const bool trains_norm = std::ranges::any_of(
      sizes, [&](const auto& one) { return one.first.starts_with("norm.") && !kept.contains(one.first); });
  const bool trains_before_output = first_trained < config.n_layers || trains_norm;
  double flops = 0;
  for (const auto& [name, size] : sizes) {
    // A tied embedding's product is that of the output layer.
    const std::int64_t layer = name == "tok_embeddings.weight" ? config.n_layers : layer_of(config, name);
    const double product = 2 * share_of_tokens(config, name) * static_cast<double>(size);
    // Behind the last layer inputs need a gradient only for what is before them; that of an adapter's B is for its A.
    const bool is_behind = layer == config.n_layers && !name.ends_with(kLoraB);
    const bool passes_back = is_behind ? trains_before_output : layer >= first_trained;
    flops += product + (passes_back ? product : 0) + (kept.contains(name) ? 0 : product);
  }
  const auto behind = static_cast<double>(config.n_layers - std::max<std::int64_t>(first_trained, 0));
  const auto width = static_cast<double>(config.n_heads * (config.head_dim() + config.value_dim()));
  return {.in_products = flops, .per_position = (2 * static_cast<double>(config.n_layers) + 4 * behind) * width};
}

TrainedCount trained_count(const LlamaConfig& config, const std::vector<std::string>& frozen, const LoraOptions& lora) {
  const Sizes sizes = sizes_of(config, lora);
  TrainedCount count;
  for (const auto& [name, size] : sizes) count.all += size;
  count.trained = count.all;
  for (const std::string& name : frozen) {
    const auto size = sizes.find(name);
    if (size != sizes.end()) count.trained -= size->second;  // the scales of a base in 4 bits count for nothing
  }
  return count;
}

}  // namespace phalanx::models
