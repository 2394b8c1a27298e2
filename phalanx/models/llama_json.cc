#include "phalanx/models/llama_json.h"

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "phalanx/base/error.h"

namespace phalanx::models {
namespace {

/// Reads keys of one JSON object; a missing or mistyped one is an error that names it.
class JsonReader {
 public:
  JsonReader(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

  template <class T>
  T get(const char* key) const {
    if (!object_.contains(key)) throw CheckpointError(fmt::format("{} has no \"{}\"", where_, key));
    try {
      const nlohmann::json& value = object_.at(key);
      if (!std::is_same_v<T, std::int64_t> || is_whole(value)) return value.get<T>();
    } catch (const nlohmann::json::exception&) {
      // Said below.
    }
    throw CheckpointError(fmt::format("{}: \"{}\" is {}, which is not what it should be", where_, key,
                                      object_.at(key).dump().substr(0, 80)));
  }
  template <class T>
  T get_or(const char* key, T otherwise) const {
    return !object_.contains(key) || object_.at(key).is_null() ? otherwise : get<T>(key);
  }

 private:
  // nlohmann-json turns floats into integers, and large integers into negative ones.
  static bool is_whole(const nlohmann::json& value) {
    constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
    return value.is_number_integer() && !(value.is_number_unsigned() && value.get<std::uint64_t>() > kMost);
  }

  const nlohmann::json& object_;
  std::string where_;
};

}  // namespace

nlohmann::json llama_metadata(const LlamaConfig& config) {
  return {{"name", "llama"},
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
}

LlamaConfig llama_from_metadata(const nlohmann::json& model, const std::string& where) {
  const JsonReader read(model, where);
  LlamaConfig config;
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
  return config;
}

std::string llama_hf_config(const LlamaConfig& config, const std::string& dtype) {
  const nlohmann::json description = {{"architectures", {"LlamaForCausalLM"}},
                                      {"model_type", "llama"},
                                      {"hidden_size", config.dim},
                                      {"intermediate_size", config.ffn_hidden},
                                      {"num_hidden_layers", config.n_layers},
                                      {"num_attention_heads", config.n_heads},
                                      {"num_key_value_heads", config.n_kv_heads},
                                      {"head_dim", config.head_dim()},
                                      {"vocab_size", config.vocab_size},
                                      {"max_position_embeddings", config.max_seq_len},
                                      {"rope_theta", config.rope_theta},
                                      {"rms_norm_eps", config.norm_eps},
                                      {"tie_word_embeddings", config.tie_embeddings},
                                      {"hidden_act", "silu"},
                                      {"attention_bias", false},
                                      {"mlp_bias", false},
                                      {"torch_dtype", dtype}};
  return description.dump(2) + "\n";
}

LlamaConfig llama_config_from_hf(const std::string& text, const std::string& file) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw CheckpointError(fmt::format("{}: expected a JSON object", file));
  const JsonReader read(json, file);
  const auto refuse = [&](const std::string& what) {
    throw CheckpointError(fmt::format("{}: {} is not supported", file, what));
  };
  if (const auto type = read.get<std::string>("model_type"); type != "llama")
    refuse(fmt::format("model_type \"{}\"", type));
  if (const auto act = read.get_or<std::string>("hidden_act", "silu"); act != "silu")
    refuse(fmt::format("hidden_act \"{}\"", act));
  for (const char* bias : {"attention_bias", "mlp_bias"})
    if (read.get_or<bool>(bias, false)) refuse(bias);
  LlamaConfig config;
  config.dim = read.get<std::int64_t>("hidden_size");
  config.n_layers = read.get<std::int64_t>("num_hidden_layers");
  config.n_heads = read.get<std::int64_t>("num_attention_heads");
  config.n_kv_heads = read.get_or<std::int64_t>("num_key_value_heads", config.n_heads);
  config.ffn_hidden = read.get<std::int64_t>("intermediate_size");
  config.vocab_size = read.get<std::int64_t>("vocab_size");
  config.max_seq_len = read.get<std::int64_t>("max_position_embeddings");
  config.rope_theta = read.get_or<double>("rope_theta", 10000.0);
  config.norm_eps = read.get_or<double>("rms_norm_eps", 1e-6);
  config.tie_embeddings = read.get_or<bool>("tie_word_embeddings", false);
  try {
    config.validate();
  } catch (const ConfigError& error) {
    throw CheckpointError(fmt::format("{}: {}", file, error.what()));
  }
  if (read.get_or<std::int64_t>("head_dim", config.head_dim()) != config.head_dim())
    refuse("a head_dim other than hidden_size / num_attention_heads");
  // Newer files keep the rotary settings in one object.
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!json.contains(key) || !json.at(key).is_object()) continue;
    const JsonReader rope(json.at(key), fmt::format("{}: {}", file, key));
    const auto type = rope.get_or<std::string>("rope_type", rope.get_or<std::string>("type", "default"));
    if (type != "default") refuse(fmt::format("{} of type \"{}\"", key, type));
    config.rope_theta = rope.get_or<double>("rope_theta", config.rope_theta);
  }
  return config;
}

std::map<std::string, std::vector<std::int64_t>> llama_parameter_shapes(const LlamaConfig& config) {
  const std::int64_t dim = config.dim, kv_dim = config.n_kv_heads * config.head_dim(), hidden = config.ffn_hidden;
  std::map<std::string, std::vector<std::int64_t>> shapes = {{"tok_embeddings.weight", {config.vocab_size, dim}},
                                                             {"norm.weight", {dim}}};
  if (!config.tie_embeddings) shapes["output.weight"] = {config.vocab_size, dim};
  for (std::int64_t i = 0; i < config.n_layers; ++i) {
    const std::string layer = fmt::format("layers.{}.", i);
    shapes[layer + "attention_norm.weight"] = {dim};
    shapes[layer + "attention.wq.weight"] = {dim, dim};
    shapes[layer + "attention.wk.weight"] = {kv_dim, dim};
    shapes[layer + "attention.wv.weight"] = {kv_dim, dim};
    shapes[layer + "attention.wo.weight"] = {dim, dim};
    shapes[layer + "ffn_norm.weight"] = {dim};
    shapes[layer + "feed_forward.w1.weight"] = {hidden, dim};
    shapes[layer + "feed_forward.w2.weight"] = {dim, hidden};
    shapes[layer + "feed_forward.w3.weight"] = {hidden, dim};
  }
  return shapes;
}

}  // namespace phalanx::models
