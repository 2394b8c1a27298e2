#include "phalanx/models/config/hf_gpt2_config.h"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/models/config/json_reader.h"

namespace phalanx::models {
namespace {

// "gelu_new" is the tanh form of GELU, and so is the other name.
constexpr const char* kGelu = "gelu_new";
constexpr const char* kAlsoGelu = "gelu_pytorch_tanh";

}  // namespace

LlamaConfig gpt2_config_from_hf(const nlohmann::json& json, const std::string& file) {
  const JsonReader read(json, file);
  const auto refuse = [&](const std::string& found, const std::string& expected) {
    throw CheckpointError(fmt::format("{}: {} is not supported; expected {}", file, found, expected));
  };
  const auto expect_flag = [&](const char* key, bool expected) {
    if (read.get_or<bool>(key, expected) != expected) {
      refuse(fmt::format("\"{}\": {}", key, !expected), fmt::format("{}", expected));
    }
  };
  expect_flag("scale_attn_weights", true);
  expect_flag("scale_attn_by_inverse_layer_idx", false);
  expect_flag("reorder_and_upcast_attn", false);
  expect_flag("add_cross_attention", false);
  expect_flag("is_causal", true);
  if (const auto act = read.get_or<std::string>("activation_function", kGelu); act != kGelu && act != kAlsoGelu) {
    refuse(fmt::format("activation_function \"{}\"", act), fmt::format("\"{}\"", kGelu));
  }
  if (json.contains("quantization_config") && !json.at("quantization_config").is_null()) {
    refuse("\"quantization_config\"", "a model without it");
  }
  LlamaConfig config{.family = LlamaFamily::gpt2};
  config.dim = read.get<std::int64_t>("n_embd");
  config.n_layers = read.get<std::int64_t>("n_layer");
  config.n_heads = config.n_kv_heads = read.get<std::int64_t>("n_head");
  config.ffn_hidden = read.get_or<std::int64_t>("n_inner", 4 * config.dim);
  config.vocab_size = read.get<std::int64_t>("vocab_size");
  config.max_seq_len = read.get<std::int64_t>("n_positions");
  config.norm_eps = read.get_or<double>("layer_norm_epsilon", 1e-5);
  config.tie_embeddings = read.get_or<bool>("tie_word_embeddings", true);
  return config;
}

void add_gpt2_keys(nlohmann::json& description, const LlamaConfig& config) {
  description.update({{"n_embd", config.dim},
                      {"n_layer", config.n_layers},
                      {"n_head", config.n_heads},
                      {"n_inner", config.ffn_hidden},
                      {"n_positions", config.max_seq_len},
                      {"layer_norm_epsilon", config.norm_eps},
                      {"activation_function", kGelu}});
}

}  // namespace phalanx::models
