#include "phalanx/models/config/hf_config.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/json_number.h"
#include "phalanx/base/json_text.h"
#include "phalanx/models/config/hf_gpt2_config.h"
#include "phalanx/models/config/json_reader.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::models {
namespace {

constexpr std::int64_t kMistralWindow = 4096, kQwen3HeadDim = 128;  // transformers' defaults
constexpr double kMixtralTheta = 1e6;
constexpr double kMostPositions = 1e15;

class ConfigFile {
 public:
  ConfigFile(const nlohmann::json& json, std::string file) : json_(json), file_(std::move(file)), read_(json, file_) {}

  LlamaConfig config() const {
    const LlamaFamily of_file = family();
    const LlamaConfig config = of_file == LlamaFamily::gpt2 ? gpt2_config_from_hf(json_, file_) : like_llama(of_file);
    try {
      config.validate();
    } catch (const ConfigError& error) {
      throw CheckpointError(fmt::format("{}: {}", file_, error.what()));
    }
    return config;
  }

 private:
  [[noreturn]] void refuse(const std::string& what, const std::string& expected) const {
    throw CheckpointError(fmt::format("{}: {} is not supported; expected {}", file_, what, expected));
  }
  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }
  [[noreturn]] void fail(const std::string& what) const { throw CheckpointError(fmt::format("{}: {}", file_, what)); }

  LlamaFamily family() const {
    const auto type = read_.get<std::string>("model_type");
    const auto family = family_from_name(type);
    if (!family) refuse(fmt::format("model_type \"{}\"", type), "one of " + family_names());
    return *family;
  }

  LlamaConfig like_llama(LlamaFamily family) const {
    LlamaConfig config;
    config.family = family;
    refuse_what_cannot_be_done(family);
    config.dim = read_.get<std::int64_t>("hidden_size");
    config.n_layers = read_.get<std::int64_t>("num_hidden_layers");
    config.n_heads = read_.get<std::int64_t>("num_attention_heads");
    config.n_kv_heads = config.family == LlamaFamily::llama
                            ? read_.get_or<std::int64_t>("num_key_value_heads", config.n_heads)
                            : read_.get<std::int64_t>("num_key_value_heads");
    config.ffn_hidden = read_.get<std::int64_t>("intermediate_size");
    config.vocab_size = read_.get<std::int64_t>("vocab_size");
    config.max_seq_len = read_.get<std::int64_t>("max_position_embeddings");
    config.norm_eps = read_.get_or<double>("rms_norm_eps", config.has_experts() ? 1e-5 : 1e-6);
    config.tie_embeddings = read_.get_or<bool>("tie_word_embeddings", false);
    const std::int64_t own = read_.get_or<std::int64_t>("head_dim", default_head_dim(config.family));
    if (config.n_heads < 1 || own * config.n_heads != config.dim) config.own_head_dim = own;
    config.sliding_window = window(config);
    if (config.has_experts()) {
      config.experts = read_.get<std::int64_t>("num_local_experts");
      config.experts_per_token = read_.get_or<std::int64_t>("num_experts_per_tok", 2);
    }
    take_rope(config);
    return config;
  }

  void refuse_what_cannot_be_done(LlamaFamily family) const {
    if (const auto act = read_.get_or<std::string>("hidden_act", "silu"); act != "silu") {
      refuse(fmt::format("hidden_act \"{}\"", act), "\"silu\"");
    }
    // The last one asks for a loss that balances the experts' load.
    for (const char* flag : {"attention_bias", "mlp_bias", "output_router_logits", "use_bidirectional_attention"}) {
      if (read_.get_or<bool>(flag, false)) refuse(fmt::format("\"{}\": true", flag), "false");
    }
    if (!read_.get_or<bool>("is_causal", true)) refuse("\"is_causal\": false", "true");
    for (const char* key : {"quantization_config", "num_experts", "num_local_experts", "attn_logit_softcapping",
                            "final_logit_softcapping", "embedding_multiplier", "residual_multiplier", "logits_scaling",
                            "attention_multiplier", "clip_qkv", "no_rope_layers", "swiglu_limit", "attention_sinks"}) {
      if (family == LlamaFamily::mixtral && key == std::string_view("num_local_experts")) continue;
      if (has(key)) refuse(fmt::format("\"{}\"", key), "a model without it");
    }
    if (const double noise = read_.get_or<double>("router_jitter_noise", 0.0); noise != 0.0) {
      refuse(fmt::format("\"router_jitter_noise\": {}", noise), "0");
    }
    if (const double part = read_.get_or<double>("partial_rotary_factor", 1.0); part != 1.0) {
      refuse(fmt::format("\"partial_rotary_factor\": {}", part), "1");
    }
  }

  static std::int64_t default_head_dim(LlamaFamily family) { return family == LlamaFamily::qwen3 ? kQwen3HeadDim : 0; }

  // Mistral's window applies to all layers. Qwen's applies to layers from max_window_layers on, if it is enabled.
  // layer_types states the same for each layer.
  std::int64_t window(const LlamaConfig& config) const {
    if (config.family == LlamaFamily::llama) return 0;
    if (config.family == LlamaFamily::mixtral) return read_.get_or<std::int64_t>("sliding_window", 0);
    if (config.family == LlamaFamily::mistral) {
      return json_.contains("sliding_window") ? read_.get_or<std::int64_t>("sliding_window", 0) : kMistralWindow;
    }
    const std::int64_t sliding = sliding_layers(config.n_layers);
    const bool on = read_.get_or<bool>("use_sliding_window", false);
    if (!on && sliding > 0 && has("layer_types")) {
      fail(
          fmt::format("\"layer_types\" gives {} of {} layers a sliding window, but \"use_sliding_window\" is false: "
                      "expected true, or \"full_attention\" alone",
                      sliding, config.n_layers));
    }
    if (!on || sliding == 0) return 0;
    if (sliding != config.n_layers) {
      refuse(fmt::format("a sliding window in {} of {} layers", sliding, config.n_layers), "it in all or none");
    }
    return read_.get<std::int64_t>("sliding_window");
  }

  std::int64_t sliding_layers(std::int64_t n_layers) const {
    if (has("layer_types")) {
      const auto types = read_.get<std::vector<std::string>>("layer_types");
      if (static_cast<std::int64_t>(types.size()) != n_layers) {
        fail(fmt::format("\"layer_types\" names {} layers, but \"num_hidden_layers\" is {}", types.size(), n_layers));
      }
      std::int64_t sliding = 0;
      for (const std::string& type : types) {
        if (type != "full_attention" && type != "sliding_attention") {
          refuse(fmt::format("a layer of type \"{}\"", type), "\"full_attention\" or \"sliding_attention\"");
        }
        if (type == "sliding_attention") ++sliding;
      }
      return sliding;
    }
    const auto full = read_.get_or<std::int64_t>("max_window_layers", 28);
    return std::max<std::int64_t>(n_layers - std::max<std::int64_t>(full, 0), 0);
  }

  void take_rope(LlamaConfig& config) const {
    config.rope_theta = read_.get_or<double>("rope_theta", config.has_experts() ? kMixtralTheta : 10000.0);
    const nlohmann::json* before = nullptr;
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      if (!has(key)) continue;
      const nlohmann::json& object = json_.at(key);
      if (!object.is_object()) fail(fmt::format("\"{}\" is not an object", key));
      if (before && *before != object) {
        fail(fmt::format(
            "\"rope_scaling\" and \"rope_parameters\" say different things: {} and {}: expected one of them",
            before->dump(-1, ' ', true).substr(0, 120), object.dump(-1, ' ', true).substr(0, 120)));
      }
      before = &object;
      take_rope(config, key);
    }
  }

  void take_rope(LlamaConfig& config, const char* key) const {
    const JsonReader rope(json_.at(key), fmt::format("{}: {}", file_, key));
    for (const auto& [name, value] : json_.at(key).items()) {
      if (value.is_object())
        refuse(fmt::format("{} of its own for \"{}\" layers", key, name), "the same for all layers");
    }
    for (const char* same : {"rope_theta", "partial_rotary_factor"}) {
      if (!has(same)) continue;
      const double outside = read_.get<double>(same), inside = rope.get_or<double>(same, outside);
      if (inside != outside) {
        fail(fmt::format("\"{}\" is {}, but {} in {}: expected it once, or the same", same, outside, inside, key));
      }
    }
    if (rope.get_or<std::string>("rope_type", "") != rope.get_or<std::string>("type", "") &&
        !rope.get_or<std::string>("rope_type", "").empty() && !rope.get_or<std::string>("type", "").empty()) {
      fail(fmt::format("{}: \"type\" is \"{}\", but \"rope_type\" is \"{}\": expected one of them, or the same", key,
                       rope.get<std::string>("type"), rope.get<std::string>("rope_type")));
    }
    const auto name = rope.get_or<std::string>("rope_type", rope.get_or<std::string>("type", ""));
    if (name.empty() && rope.get_or<double>("factor", 1.0) != 1.0) {
      fail(
          fmt::format("{}: \"factor\" is {}, but \"rope_type\" is not there: expected one of default, linear, dynamic "
                      "and llama3",
                      key, rope.get<double>("factor")));
    }
    const auto type = name.empty() ? RopeScalingType::none : rope_scaling_from_name(name);
    if (!type) refuse(fmt::format("{} of type \"{}\"", key, name), "default, linear, dynamic or llama3");
    if (const double part = rope.get_or<double>("partial_rotary_factor", 1.0); part != 1.0) {
      refuse(fmt::format("\"partial_rotary_factor\": {} in {}", part, key), "1");
    }
    config.rope_theta = rope.get_or<double>("rope_theta", config.rope_theta);
    if (*type == RopeScalingType::none) return;
    RopeScaling scaling{.type = *type, .factor = rope.get<double>("factor")};
    if (*type == RopeScalingType::llama3) {
      scaling.low_freq_factor = rope.get<double>("low_freq_factor");
      scaling.high_freq_factor = rope.get<double>("high_freq_factor");
      scaling.original_max_seq_len = rope.get<std::int64_t>("original_max_position_embeddings");
    }
    if (*type == RopeScalingType::dynamic) {
      // The file states the length before stretching; the model supports that length times the factor.
      const double stretched = std::floor(scaling.factor * static_cast<double>(config.max_seq_len));
      if (!(scaling.factor >= 1.0) || !(stretched < kMostPositions)) {
        fail(fmt::format("{}: \"factor\" is {}: expected 1 or above", key, scaling.factor));
      }
      scaling.original_max_seq_len = config.max_seq_len;
      config.max_seq_len = static_cast<std::int64_t>(stretched);
    }
    config.rope_scaling = scaling;
  }

  const nlohmann::json& json_;
  const std::string file_;
  const JsonReader read_;
};

void add_llama_keys(nlohmann::json& description, const LlamaConfig& config) {
  const RopeScaling& rope = config.rope_scaling;
  description.update({{"hidden_size", config.dim},
                      {"intermediate_size", config.ffn_hidden},
                      {"num_hidden_layers", config.n_layers},
                      {"num_attention_heads", config.n_heads},
                      {"num_key_value_heads", config.n_kv_heads},
                      {"head_dim", config.head_dim()},
                      {"max_position_embeddings",
                       rope.type == RopeScalingType::dynamic ? rope.original_max_seq_len : config.max_seq_len},
                      {"rope_theta", config.rope_theta},
                      {"rms_norm_eps", config.norm_eps},
                      {"hidden_act", "silu"}});
  if (config.family == LlamaFamily::llama) {
    description["attention_bias"] = false;
    description["mlp_bias"] = false;
  } else if (config.family == LlamaFamily::mistral || config.has_experts()) {
    description["sliding_window"] = nullptr;
    if (config.sliding_window > 0) description["sliding_window"] = config.sliding_window;
  } else {
    description["use_sliding_window"] = config.sliding_window > 0;
    description["max_window_layers"] = config.sliding_window > 0 ? 0 : config.n_layers;
    if (config.sliding_window > 0) description["sliding_window"] = config.sliding_window;
  }
  if (config.has_experts()) {
    description["num_local_experts"] = config.experts;
    description["num_experts_per_tok"] = config.experts_per_token;
  }
  if (rope.type == RopeScalingType::none) return;
  nlohmann::json& scaling = description["rope_scaling"];
  scaling = {{"rope_type", rope_scaling_name(rope.type)}, {"factor", rope.factor}};
  if (rope.type == RopeScalingType::llama3) {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
    scaling["original_max_position_embeddings"] = rope.original_max_seq_len;
  }
}

}  // namespace

const char* hf_architecture(LlamaFamily family) {
  switch (family) {
    case LlamaFamily::mistral:
      return "MistralForCausalLM";
    case LlamaFamily::qwen2:
      return "Qwen2ForCausalLM";
    case LlamaFamily::qwen3:
      return "Qwen3ForCausalLM";
    case LlamaFamily::gpt2:
      return "GPT2LMHeadModel";
    case LlamaFamily::mixtral:
      return "MixtralForCausalLM";
    default:
      return "LlamaForCausalLM";
  }
}

LlamaConfig llama_config_from_hf(const std::string& text, const std::string& file) {
  return ConfigFile(parse_json_object<CheckpointError>(text, file), file).config();
}

std::vector<std::int64_t> hf_end_tokens(const std::string& text, const std::string& file) {
  const auto json = parse_json_object<CheckpointError>(text, file);
  const auto found = json.find("eos_token_id");
  if (found == json.end() || found->is_null()) return {};
  std::vector<std::int64_t> tokens;
  for (const auto& token : found->is_array() ? *found : nlohmann::json::array({*found})) {
    if (!is_whole_number(token) || token.get<std::int64_t>() < 0) {
      throw CheckpointError(fmt::format("{}: \"eos_token_id\" is {}: expected a token, or a list of tokens", file,
                                        found->dump().substr(0, 80)));
    }
    tokens.push_back(token.get<std::int64_t>());
  }
  return tokens;
}

std::vector<std::int64_t> hf_end_tokens_in(const std::filesystem::path& folder) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::filesystem::path file = folder / name;
    std::error_code error;
    if (!std::filesystem::is_regular_file(file, error)) continue;
    if (auto tokens = hf_end_tokens(read_file(file, kMaxHfConfigBytes), file.string()); !tokens.empty()) return tokens;
  }
  return {};
}

std::string llama_hf_config(const LlamaConfig& config, const std::string& dtype) {
  nlohmann::json description = {{"architectures", {hf_architecture(config.family)}},
                                {"model_type", family_name(config.family)},
                                {"vocab_size", config.vocab_size},
                                {"tie_word_embeddings", config.tie_embeddings},
                                {"torch_dtype", dtype}};
  config.is_gpt2() ? add_gpt2_keys(description, config) : add_llama_keys(description, config);
  return description.dump(2) + "\n";
}

}  // namespace phalanx::models
