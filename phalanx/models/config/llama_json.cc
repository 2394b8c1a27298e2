#include "phalanx/models/config/llama_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/models/config/json_reader.h"

namespace phalanx::models {
namespace {

constexpr std::array<std::pair<RopeScalingType, const char*>, 6> kScalings = {{
    {RopeScalingType::none, "default"},
    {RopeScalingType::linear, "linear"},
    {RopeScalingType::dynamic, "dynamic"},
    {RopeScalingType::llama3, "llama3"},
    {RopeScalingType::yarn, "yarn"},
    {RopeScalingType::longrope, "longrope"},
}};

/// All keys that identify the weights' model; any unknown one could change their meaning.
constexpr std::array<std::string_view, 37> kKeys = {"name",
                                                    "flavor",
                                                    "dim",
                                                    "n_layers",
                                                    "n_heads",
                                                    "n_kv_heads",
                                                    "ffn_hidden",
                                                    "vocab_size",
                                                    "max_seq_len",
                                                    "rope_theta",
                                                    "norm_eps",
                                                    "tie_embeddings",
                                                    "head_dim",
                                                    "sliding_window",
                                                    "experts",
                                                    "experts_per_token",
                                                    "rope_scaling",
                                                    "normalise_routing",
                                                    "full_layers",
                                                    "unrotated_layers",
                                                    "window_rope_theta",
                                                    "rotary_dim",
                                                    "query_scalar",
                                                    "activation_limit",
                                                    "embedding_multiplier",
                                                    "residual_multiplier",
                                                    "attention_multiplier",
                                                    "logits_scaling",
                                                    "kv_lora_rank",
                                                    "q_lora_rank",
                                                    "v_head_dim",
                                                    "dense_layers",
                                                    "dense_hidden",
                                                    "shared_experts",
                                                    "expert_groups",
                                                    "groups_per_token",
                                                    "routed_scaling"};

/// Of latent attention and of experts: written unless 0.
constexpr std::array<std::pair<const char*, std::int64_t LlamaConfig::*>, 8> kWholeNumbers = {{
    {"kv_lora_rank", &LlamaConfig::kv_lora_rank},
    {"q_lora_rank", &LlamaConfig::q_lora_rank},
    {"v_head_dim", &LlamaConfig::v_head_dim},
    {"dense_layers", &LlamaConfig::dense_layers},
    {"dense_hidden", &LlamaConfig::dense_hidden},
    {"shared_experts", &LlamaConfig::shared_experts},
    {"expert_groups", &LlamaConfig::expert_groups},
    {"groups_per_token", &LlamaConfig::groups_per_token},
}};

/// Of granite: written unless they are as in a new config.
constexpr std::array<std::pair<const char*, double LlamaConfig::*>, 4> kMultipliers = {{
    {"embedding_multiplier", &LlamaConfig::embedding_multiplier},
    {"residual_multiplier", &LlamaConfig::residual_multiplier},
    {"attention_multiplier", &LlamaConfig::attention_multiplier},
    {"logits_scaling", &LlamaConfig::logits_scaling},
}};

nlohmann::json scaling_metadata(const RopeScaling& rope) {
  nlohmann::json scaling = {{"type", rope_scaling_name(rope.type)},
                            {"factor", rope.factor},
                            {"low_freq_factor", rope.low_freq_factor},
                            {"high_freq_factor", rope.high_freq_factor},
                            {"original_max_seq_len", rope.original_max_seq_len}};
  if (rope.type == RopeScalingType::yarn) {
    scaling["beta_fast"] = rope.beta_fast;
    scaling["beta_slow"] = rope.beta_slow;
    scaling["truncate"] = rope.truncate;
  }
  if (rope.type == RopeScalingType::longrope) {
    scaling["short_factor"] = rope.short_factor;
    scaling["long_factor"] = rope.long_factor;
  }
  if (rope.mscale_all_dim != 0.0) scaling["mscale_all_dim"] = rope.mscale_all_dim;
  if (rope.attention_factor != 1.0) scaling["attention_factor"] = rope.attention_factor;
  return scaling;
}

RopeScaling scaling_from_metadata(const nlohmann::json& scaling, const std::string& where) {
  const JsonReader read(scaling, where + ": rope_scaling");
  const auto type = rope_scaling_from_name(read.get<std::string>("type"));
  if (!type) throw CheckpointError(fmt::format("{}: rope_scaling has an unknown \"type\"", where));
  const RopeScaling defaults;
  return {.type = *type,
          .factor = read.get<double>("factor"),
          .low_freq_factor = read.get<double>("low_freq_factor"),
          .high_freq_factor = read.get<double>("high_freq_factor"),
          .original_max_seq_len = read.get<std::int64_t>("original_max_seq_len"),
          .attention_factor = read.get_or<double>("attention_factor", defaults.attention_factor),
          .beta_fast = read.get_or<double>("beta_fast", defaults.beta_fast),
          .beta_slow = read.get_or<double>("beta_slow", defaults.beta_slow),
          .truncate = read.get_or<bool>("truncate", defaults.truncate),
          .mscale_all_dim = read.get_or<double>("mscale_all_dim", defaults.mscale_all_dim),
          .short_factor = read.get_or<std::vector<double>>("short_factor", {}),
          .long_factor = read.get_or<std::vector<double>>("long_factor", {})};
}

}  // namespace

const char* rope_scaling_name(RopeScalingType type) {
  for (const auto& [known, name] : kScalings) {
    if (known == type) return name;
  }
  return "";
}

std::optional<RopeScalingType> rope_scaling_from_name(std::string_view name) {
  for (const auto& [type, known] : kScalings) {
    if (name == known) return type;
  }
  return std::nullopt;
}
nlohmann::json llama_metadata(const LlamaConfig& config) {
  nlohmann::json model = {{"name", family_name(config.family)},
                          {"dim", config.dim},
                          {"n_layers", config.n_layers},
                          {"n_heads", config.n_heads},
                          {"n_kv_heads", config.n_kv_heads},
                          {"ffn_hidden", config.ffn_hidden},
                          {"vocab_size", config.vocab_size},
                          {"max_seq_len", config.max_seq_len},
                          {"rope_theta", config.rope_theta},
                          {"norm_eps", config.norm_eps},
                          {"tie_embeddings", config.tie_embeddings}};
  if (config.own_head_dim != 0) model["head_dim"] = config.own_head_dim;
  if (config.sliding_window != 0) model["sliding_window"] = config.sliding_window;
  if (config.has_experts()) {
    model["experts"] = config.experts;
    model["experts_per_token"] = config.experts_per_token;
  }
  if (!config.normalise_routing) model["normalise_routing"] = false;
  if (!config.full_layers.empty()) model["full_layers"] = config.full_layers;
  if (!config.unrotated_layers.empty()) model["unrotated_layers"] = config.unrotated_layers;
  if (config.window_rope_theta != 0.0) model["window_rope_theta"] = config.window_rope_theta;
  if (config.rotary_dim != 0) model["rotary_dim"] = config.rotary_dim;
  if (config.query_scalar != 0.0) model["query_scalar"] = config.query_scalar;
  if (config.activation_limit != 0.0) model["activation_limit"] = config.activation_limit;
  for (const auto& [key, member] : kWholeNumbers) {
    if (config.*member != 0) model[key] = config.*member;
  }
  for (const auto& [key, member] : kMultipliers) {
    if (config.*member != LlamaConfig().*member) model[key] = config.*member;
  }
  if (config.routed_scaling != 1.0) model["routed_scaling"] = config.routed_scaling;
  if (config.rope_scaling.type != RopeScalingType::none) model["rope_scaling"] = scaling_metadata(config.rope_scaling);
  return model;
}

LlamaConfig llama_from_metadata(const nlohmann::json& model, const std::string& where) {
  const JsonReader read(model, where);
  LlamaConfig config;
  const auto name = read.get_or<std::string>("name", "llama");
  const auto family = family_from_name(name);
  if (!family) {
    throw CheckpointError(fmt::format("{}: \"name\" is \"{}\": expected one of {}", where, name, family_names()));
  }
  config.family = *family;
  config.dim = read.get<std::int64_t>("dim");
  config.n_layers = read.get<std::int64_t>("n_layers");
  config.n_heads = read.get<std::int64_t>("n_heads");
  config.n_kv_heads = read.get<std::int64_t>("n_kv_heads");
  config.ffn_hidden = read.get<std::int64_t>("ffn_hidden");
  config.vocab_size = read.get<std::int64_t>("vocab_size");
  config.max_seq_len = read.get<std::int64_t>("max_seq_len");
  config.rope_theta = read.get<double>("rope_theta");
  config.norm_eps = read.get<double>("norm_eps");
  config.tie_embeddings = read.get<bool>("tie_embeddings");
  config.own_head_dim = read.get_or<std::int64_t>("head_dim", 0);
  config.sliding_window = read.get_or<std::int64_t>("sliding_window", 0);
  config.experts = read.get_or<std::int64_t>("experts", 0);
  config.experts_per_token = read.get_or<std::int64_t>("experts_per_token", 0);
  config.normalise_routing = read.get_or<bool>("normalise_routing", true);
  config.full_layers = read.get_or<std::vector<std::int64_t>>("full_layers", {});
  config.unrotated_layers = read.get_or<std::vector<std::int64_t>>("unrotated_layers", {});
  config.window_rope_theta = read.get_or<double>("window_rope_theta", 0.0);
  config.rotary_dim = read.get_or<std::int64_t>("rotary_dim", 0);
  config.query_scalar = read.get_or<double>("query_scalar", 0.0);
  config.activation_limit = read.get_or<double>("activation_limit", 0.0);
  for (const auto& [key, member] : kWholeNumbers) config.*member = read.get_or<std::int64_t>(key, 0);
  for (const auto& [key, member] : kMultipliers) config.*member = read.get_or<double>(key, config.*member);
  config.routed_scaling = read.get_or<double>("routed_scaling", 1.0);
  for (const auto& [key, value] : model.items()) {
    if (std::ranges::find(kKeys, key) != kKeys.end()) continue;
    throw CheckpointError(fmt::format(
        "{} says \"{}\", which this program does not know: a later version of Phalanx wrote it", where, key));
  }
  if (model.contains("rope_scaling")) config.rope_scaling = scaling_from_metadata(model.at("rope_scaling"), where);
  return config;
}

LlamaConfig llama_from_checkpoint(const nlohmann::json& model, const std::string& where) {
  LlamaConfig config = llama_from_metadata(model, where + ": metadata.model");
  try {
    config.validate();
  } catch (const ConfigError& error) {
    throw CheckpointError(fmt::format("{}: metadata.{}", where, error.what()));
  }
  return config;
}

namespace {

using Shapes = std::map<std::string, std::vector<std::int64_t>>;

void add_latent_attention(const LlamaConfig& config, const std::string& name, Shapes& shapes) {
  const std::int64_t dim = config.dim, heads = config.n_heads, q_dim = heads * config.head_dim();
  const std::int64_t kv_rank = config.kv_lora_rank, rotated = config.rotary_dim;
  if (config.q_lora_rank == 0) {
    shapes[name + "wq.weight"] = {q_dim, dim};
  } else {
    shapes[name + "wq_a.weight"] = {config.q_lora_rank, dim};
    shapes[name + "q_norm.weight"] = {config.q_lora_rank};
    shapes[name + "wq_b.weight"] = {q_dim, config.q_lora_rank};
  }
  shapes[name + "wkv_a.weight"] = {kv_rank + rotated, dim};
  shapes[name + "kv_norm.weight"] = {kv_rank};
  shapes[name + "wkv_b.weight"] = {heads * (config.head_dim() - rotated + config.v_head_dim), kv_rank};
  shapes[name + "wo.weight"] = {dim, heads * config.v_head_dim};
}

void add_attention(const LlamaConfig& config, const std::string& name, Shapes& shapes) {
  const std::int64_t dim = config.dim, q_dim = config.n_heads * config.head_dim(),
                     kv_dim = config.n_kv_heads * config.head_dim();
  shapes[name + "wq.weight"] = {q_dim, dim};
  shapes[name + "wk.weight"] = {kv_dim, dim};
  shapes[name + "wv.weight"] = {kv_dim, dim};
  shapes[name + "wo.weight"] = {dim, q_dim};
  if (config.has_qkv_bias()) {
    shapes[name + "wq.bias"] = {q_dim};
    shapes[name + "wk.bias"] = {kv_dim};
    shapes[name + "wv.bias"] = {kv_dim};
  }
  if (config.has_output_bias()) shapes[name + "wo.bias"] = {dim};
  if (config.has_sinks()) shapes[name + "sinks"] = {config.n_heads};
  if (config.has_qk_norm()) {
    shapes[name + "q_norm.weight"] = {config.q_norm_size()};
    shapes[name + "k_norm.weight"] = {config.k_norm_size()};
  }
}

}  // namespace

std::map<std::string, std::vector<std::int64_t>> llama_parameter_shapes(const LlamaConfig& config) {
  const std::int64_t dim = config.dim, hidden = config.ffn_hidden;
  Shapes shapes = {{"tok_embeddings.weight", {config.vocab_size, dim}}, {"norm.weight", {dim}}};
  if (!config.tie_embeddings) shapes["output.weight"] = {config.vocab_size, dim};
  const auto net = [&](const std::string& name, std::int64_t units) {
    shapes[name + "w1.weight"] = {units, dim};
    shapes[name + "w2.weight"] = {dim, units};
    if (!config.is_gpt2()) shapes[name + "w3.weight"] = {units, dim};
  };
  if (config.is_gpt2()) {
    shapes["pos_embeddings.weight"] = {config.max_seq_len, dim};
    shapes["norm.bias"] = {dim};
  }
  for (std::int64_t i = 0; i < config.n_layers; ++i) {
    const std::string layer = fmt::format("layers.{}.", i);
    shapes[layer + "attention_norm.weight"] = {dim};
    const auto attention = config.has_latent_attention() ? add_latent_attention : add_attention;
    attention(config, layer + "attention.", shapes);
    shapes[layer + "ffn_norm.weight"] = {dim};
    if (config.norms_per_layer() == 4) {
      shapes[layer + "attention_post_norm.weight"] = {dim};
      shapes[layer + "ffn_post_norm.weight"] = {dim};
    }
    if (config.has_experts(i)) {
      shapes[layer + "moe.gate.weight"] = {config.experts, dim};
      if (config.has_expert_net_biases()) shapes[layer + "moe.gate.bias"] = {config.experts};
      for (std::int64_t e = 0; e < config.experts; ++e) {
        const std::string expert = fmt::format("{}moe.experts.{}.", layer, e);
        net(expert, hidden);
        if (!config.has_expert_net_biases()) continue;
        shapes[expert + "w1.bias"] = shapes[expert + "w3.bias"] = {hidden};
        shapes[expert + "w2.bias"] = {dim};
      }
      if (config.shared_experts > 0) net(layer + "moe.shared_experts.", config.shared_units());
    } else {
      net(layer + "feed_forward.", config.dense_units());
    }
    if (!config.is_gpt2()) continue;
    shapes[layer + "attention_norm.bias"] = {dim};
    shapes[layer + "ffn_norm.bias"] = {dim};
    shapes[layer + "feed_forward.w1.bias"] = {hidden};
    shapes[layer + "feed_forward.w2.bias"] = {dim};
  }
  return shapes;
}

std::map<std::string, std::vector<std::int64_t>> llama_weight_shapes(const LlamaConfig& config) {
  Shapes shapes = llama_parameter_shapes(config);
  for (std::int64_t i = 0; config.has_expert_biases() && i < config.n_layers; ++i) {
    if (config.has_experts(i)) shapes[fmt::format("layers.{}.moe.expert_bias", i)] = {config.experts};
  }
  return shapes;
}

}  // namespace phalanx::models
