#include "phalanx/models/config/lora_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/layout/nf4_blocks.h"
#include "phalanx/models/config/file_layers.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::models {
namespace {

/// In the order of a block. A model has some of them.
constexpr std::array<const char*, 14> kLinear = {
    "attention.wq",    "attention.wq_a",        "attention.wq_b",        "attention.wkv_a",      "attention.wkv_b",
    "attention.wk",    "attention.wv",          "attention.wo",          "feed_forward.w1",      "feed_forward.w2",
    "feed_forward.w3", "moe.shared_experts.w1", "moe.shared_experts.w2", "moe.shared_experts.w3"};
constexpr std::string_view kAllLinear = "all-linear";  // of the blocks
constexpr const char *kOutput = "output", *kHfOutput = "lm_head";

struct LayerName {
  std::string ours, theirs;
};

std::vector<LayerName> layers_of(const LlamaConfig& config) {
  std::vector<LayerName> names;
  const auto shapes = llama_parameter_shapes(config);
  for (std::int64_t layer = 0; layer < config.n_layers; ++layer) {
    for (const char* linear : kLinear) {
      const std::string ours = fmt::format("layers.{}.{}", layer, linear);
      if (!shapes.contains(ours + ".weight")) continue;
      names.push_back({ours, file_layer_name(config, ours)});
    }
  }
  return names;
}

bool matches(const std::string& target, const std::string& name) {
  return fnmatch(target.c_str(), name.c_str(), 0) == 0 || fnmatch(("*." + target).c_str(), name.c_str(), 0) == 0;
}

/// Rows of NF4 are whole blocks.
void require_whole_blocks(const LlamaConfig& config, const std::string& what) {
  const auto shapes = llama_parameter_shapes(config);
  for (const LayerName& layer : layers_of(config)) {
    const std::int64_t columns = shapes.at(layer.ours + ".weight")[1];
    if (columns % kNf4Block == 0) continue;
    throw ConfigError(
        fmt::format("{}: base_dtype is \"nf4\", but rows of {} have {} elements, which are no whole blocks of "
                    "{}; expected a model with multiples of {}, or base_dtype = \"bfloat16\"",
                    what, layer.ours, columns, kNf4Block, kNf4Block));
  }
}

/// An adapter in PEFT's format is one of a whole layer of the files.
void require_whole_file_layers(const LlamaConfig& config, const std::vector<LayerName>& layers,
                               const std::vector<bool>& chosen, const std::string& what) {
  std::map<std::string, std::array<const LayerName*, 2>> of_file;  // without an adapter, and with one
  for (std::size_t i = 0; i < layers.size(); ++i) of_file[layers[i].theirs].at(chosen[i] ? 1 : 0) = &layers[i];
  for (const auto& [theirs, parts] : of_file) {
    if (parts[0] == nullptr || parts[1] == nullptr) continue;
    throw ConfigError(
        fmt::format("{}: target_modules mean {}, but not {}: the files of the family {} keep them in one matrix, {}, "
                    "which has an adapter as a whole; expected all of its parts, such as by \"{}\", or none",
                    what, parts[1]->ours, parts[0]->ours, family_name(config.family), theirs,
                    theirs.substr(theirs.rfind('.') + 1)));
  }
}

/// Last names, which most targets are.
std::vector<std::string> last_names(const std::vector<LayerName>& layers) {
  std::vector<std::string> result{std::string(kAllLinear)};
  for (const LayerName& layer : layers) {
    for (const std::string* name : {&layer.theirs, &layer.ours}) {
      std::string last = name->substr(name->rfind('.') + 1);
      if (std::ranges::find(result, last) == result.end()) result.push_back(std::move(last));
    }
  }
  return result;
}

}  // namespace

bool is_lora_name(const std::string& parameter) { return parameter.ends_with(kLoraA) || parameter.ends_with(kLoraB); }

std::vector<std::string> nf4_layers(const LlamaConfig& config, const LoraOptions& options) {
  std::vector<std::string> names;
  if (!options.has_nf4_base()) return names;
  for (const LayerName& layer : layers_of(config)) names.push_back(layer.ours);
  return names;
}

void check_nf4_cuts(const LlamaConfig& config, const LoraOptions& options, std::int64_t tensor_parallel_size) {
  if (!options.has_nf4_base()) return;
  for (const auto& [layer, columns] :
       {std::pair{"attention.wo", config.n_heads * config.head_dim()}, {"feed_forward.w2", config.ffn_hidden}}) {
    const std::int64_t blocks = columns / kNf4Block;
    if (blocks % tensor_parallel_size == 0) continue;
    throw ConfigError(
        fmt::format("[parallelism] tensor_parallel_degree {}: rows of layers.0.{} have {} elements, {} x {}, and ranks "
                    "cannot share "
                    "a block of {} in NF4; expected a degree that divides {}, or [lora] base_dtype = \"bfloat16\"",
                    tensor_parallel_size, layer, columns, blocks, kNf4Block, kNf4Block, blocks));
  }
}

std::int64_t least_bytes(const LlamaConfig& config, const LoraOptions& options) {
  const bool may_be_in_4_bits = options.has_nf4_base() || config.family == LlamaFamily::gpt_oss;
  return may_be_in_4_bits ? config.parameter_count() / 2 : config.parameter_count();
}

std::vector<std::string> lora_layers(const LlamaConfig& config, const LoraOptions& options, const std::string& what) {
  if (options.rank == 0) return {};
  if (options.rank < 0 || !(options.alpha > 0) || !(options.dropout >= 0 && options.dropout < 1)) {
    throw ConfigError(fmt::format(
        "{}: rank {}, alpha {}, dropout {}: expected a rank of 0 or more, an alpha above 0 and 0 <= dropout < 1", what,
        options.rank, options.alpha, options.dropout));
  }
  if (options.has_narrow_base() && config.has_experts()) {
    throw ConfigError(
        fmt::format("{}: base_dtype is \"{}\", but experts of a mixture are stored in float32 alone; expected "
                    "base_dtype = \"float32\", or a family without experts",
                    what, options.base_dtype));
  }
  if (options.has_nf4_base()) require_whole_blocks(config, what);
  std::vector<LayerName> layers = layers_of(config);
  const std::size_t of_blocks = layers.size();
  if (!config.tie_embeddings) layers.push_back({kOutput, kHfOutput});
  if (options.target_modules.empty()) {
    throw ConfigError(fmt::format("{}: target_modules is empty: expected layers, such as [\"{}\"]", what, kAllLinear));
  }
  std::vector<bool> chosen(layers.size(), false);
  for (const std::string& target : options.target_modules) {
    bool any = false;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const auto& [ours, theirs] = layers[i];
      const bool is_of_block = i < of_blocks;  // a pattern means no other layer
      const bool is_one = is_of_block ? target == kAllLinear || matches(target, ours) || matches(target, theirs)
                                      : target == ours || target == theirs;
      if (is_one) chosen[i] = any = true;
    }
    if (any) continue;
    if (config.tie_embeddings && (target == kOutput || target == kHfOutput)) {
      throw ConfigError(
          fmt::format("{}: target_modules: '{}' is the output layer, whose matrix is that of the embeddings in this "
                      "model (tie_embeddings): what is added to one would be added to the other; expected layers of "
                      "the blocks, or a model with an output layer of its own",
                      what, target));
    }
    const std::vector<std::string> known = last_names(layers);
    throw ConfigError(
        fmt::format("{}: target_modules: '{}' matches none of the {} linear layers{}; expected {}, or a pattern over "
                    "whole names, such as \"{}\"{}",
                    what, target, layers.size(), did_you_mean(target, known), fmt::join(known, ", "),
                    layers.front().theirs, config.has_experts() ? " (routers and experts have no adapters)" : ""));
  }
  require_whole_file_layers(config, layers, chosen, what);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (chosen[i]) names.push_back(layers[i].ours);
  }
  return names;
}

}  // namespace phalanx::models
