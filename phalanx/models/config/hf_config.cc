#include "phalanx/models/config/hf_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
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
#include "phalanx/models/config/hf_config_file.h"
#include "phalanx/models/config/hf_families.h"
#include "phalanx/models/config/hf_gpt2_config.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::models {
namespace {

constexpr double kMostPositions = 1e15;
constexpr const char* kFullLayers = "full_attention";
constexpr const char* kWindowLayers = "sliding_attention";
constexpr const char* kOriginalLength = "original_max_position_embeddings";
constexpr std::int64_t kPhi3OriginalLength = 4096;  // transformers' default

/// Keys that would change a model's results, if its family does not read them.
constexpr std::array<const char*, 12> kNotDone = {"num_experts",
                                                  "num_local_experts",
                                                  "attn_logit_softcapping",
                                                  "final_logit_softcapping",
                                                  "embedding_multiplier",
                                                  "residual_multiplier",
                                                  "logits_scaling",
                                                  "attention_multiplier",
                                                  "clip_qkv",
                                                  "no_rope_layers",
                                                  "swiglu_limit",
                                                  "attention_sinks"};

class ConfigFile : private HfConfigFile {
 public:
  ConfigFile(const nlohmann::json& json, std::string file) : HfConfigFile{json, std::move(file)} {}

  LlamaConfig config() const {
    const LlamaFamily of_file = family();
    try {
      LlamaConfig config = of_file == LlamaFamily::gpt2 ? gpt2_config_from_hf(json, file) : like_llama(of_file);
      config.validate();
      return config;
    } catch (const ConfigError& error) {
      throw CheckpointError(fmt::format("{}: {}", file, error.what()));
    }
  }

 private:
  LlamaFamily family() const {
    const auto type = read.get<std::string>("model_type");
    const auto family = family_from_name(type);
    if (!family) refuse(fmt::format("model_type \"{}\"", type), "one of " + family_names());
    return *family;
  }

  LlamaConfig like_llama(LlamaFamily family) const {
    const HfFamily& form = hf_family(family);
    LlamaConfig config;
    config.family = family;
    refuse_what_cannot_be_done(form);
    config.dim = read.get<std::int64_t>("hidden_size");
    config.n_layers = read.get<std::int64_t>("num_hidden_layers");
    config.n_heads = read.get<std::int64_t>("num_attention_heads");
    config.n_kv_heads = form.kv_heads_default ? read.get_or<std::int64_t>("num_key_value_heads", config.n_heads)
                                              : read.get<std::int64_t>("num_key_value_heads");
    // With experts, that of dense layers: the family's own key has theirs.
    if (!form.experts_have_units) config.ffn_hidden = read.get<std::int64_t>("intermediate_size");
    config.vocab_size = read.get<std::int64_t>("vocab_size");
    config.max_seq_len = read.get<std::int64_t>("max_position_embeddings");
    config.norm_eps = read.get_or<double>("rms_norm_eps", form.norm_eps);
    config.tie_embeddings = read.get_or<bool>("tie_word_embeddings", form.tied);
    const std::int64_t own = read.get_or<std::int64_t>("head_dim", form.head_dim);
    if (config.n_heads < 1 || own * config.n_heads != config.dim) config.own_head_dim = own;
    config.experts = config.has_experts() ? 1 : 0;  // until they are read below
    config.experts_per_token = config.experts;
    if (config.traits().activation == GatedActivation::clamped_silu) config.activation_limit = 1.0;
    if (config.has_latent_attention()) {
      config.own_head_dim = 4;
      config.rotary_dim = 2;
      config.kv_lora_rank = config.v_head_dim = 1;
    }
    config.validate();  // before anything is made for each layer
    if (form.read != nullptr) form.read(*this, config);
    take_rope(config, form);
    return config;
  }

  void refuse_what_cannot_be_done(const HfFamily& form) const {
    if (const auto act = read.get_or<std::string>(form.activation_key, form.activation); act != form.activation) {
      refuse(fmt::format("{} \"{}\"", form.activation_key, act), fmt::format("\"{}\"", form.activation));
    }
    // The last but one asks for a loss that balances the experts' load.
    for (const char* flag : {"attention_bias", "mlp_bias", "output_router_logits", "use_bidirectional_attention"}) {
      if (std::ranges::find(form.keys, flag) != form.keys.end()) continue;
      if (read.get_or<bool>(flag, false)) refuse(fmt::format("\"{}\": true", flag), "false");
    }
    if (!read.get_or<bool>("is_causal", true)) refuse("\"is_causal\": false", "true");
    const bool reads_own = std::ranges::find(form.keys, "quantization_config") != form.keys.end();
    if (has("quantization_config") && !reads_own) refuse_other_quantisation(json.at("quantization_config"));
    for (const char* key : kNotDone) {
      if (has(key) && std::ranges::find(form.keys, key) == form.keys.end()) {
        refuse(fmt::format("\"{}\"", key), "a model without it");
      }
    }
    if (const double noise = read.get_or<double>("router_jitter_noise", 0.0); noise != 0.0) {
      refuse(fmt::format("\"router_jitter_noise\": {}", noise), "0");
    }
    const double part = read.get_or<double>("partial_rotary_factor", 1.0);
    const FamilyTraits& traits = traits_of(form.family);
    if (part != 1.0 && (!traits.partial_rotation || traits.latent_attention)) {
      refuse(fmt::format("\"partial_rotary_factor\": {}", part), "1");
    }
  }

  /// bitsandbytes' NF4 is read as the frozen base of adapters (checkpoint/nf4_weights.h),
  /// which the weights' reader checks.
  void refuse_other_quantisation(const nlohmann::json& how) const {
    const auto is = [&](const char* key, const nlohmann::json& value) {
      return how.is_object() && how.contains(key) && how.at(key) == value;
    };
    if (is("quant_method", "bitsandbytes") && is("bnb_4bit_quant_type", "nf4") && is("load_in_4bit", true)) return;
    refuse("\"quantization_config\"", "a model without it, or one in NF4 of bitsandbytes");
  }

  void take_rope(LlamaConfig& config, const HfFamily& form) const {
    config.rope_theta = read.get_or<double>("rope_theta", form.rope_theta);
    if (config.traits().layers_have_thetas && config.sliding_window > 0) {
      config.window_rope_theta = read.get_or<double>("rope_local_base_freq", 10000.0);
    }
    if (!config.has_latent_attention()) {
      take_partial_rotation(config, read.get_or<double>("partial_rotary_factor", 1.0));
    }
    const nlohmann::json* before = nullptr;
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      if (!has(key)) continue;
      const nlohmann::json& object = json.at(key);
      if (!object.is_object()) fail(fmt::format("\"{}\" is not an object", key));
      if (before && *before != object) {
        fail(fmt::format(
            "\"rope_scaling\" and \"rope_parameters\" say different things: {} and {}: expected one of them",
            before->dump(-1, ' ', true).substr(0, 120), object.dump(-1, ' ', true).substr(0, 120)));
      }
      before = &object;
      if (config.traits().layers_have_thetas && (object.contains(kFullLayers) || object.contains(kWindowLayers))) {
        take_rope_of_kinds(config, key, object);
      } else {
        take_rope(config, key, object);
      }
    }
  }

  /// "full_attention" and "sliding_attention" have settings of their own.
  void take_rope_of_kinds(LlamaConfig& config, const std::string& key, const nlohmann::json& object) const {
    for (const auto& [name, value] : object.items()) {
      if (name != kFullLayers && name != kWindowLayers) {
        fail(fmt::format("{}: \"{}\" is beside those of kinds of layers: expected \"{}\" and \"{}\"", key, name,
                         kFullLayers, kWindowLayers));
      }
      if (!value.is_object()) fail(fmt::format("{}: \"{}\" is not an object", key, name));
    }
    if (object.contains(kFullLayers)) {
      take_rope(config, fmt::format("{}: {}", key, kFullLayers), object.at(kFullLayers));
    }
    if (!object.contains(kWindowLayers)) return;
    const std::string where = fmt::format("{}: {}", key, kWindowLayers);
    LlamaConfig of_window = config;
    of_window.rope_theta = config.window_rope_theta != 0.0 ? config.window_rope_theta : 10000.0;
    of_window.rope_scaling = {};
    take_rope(of_window, where, object.at(kWindowLayers), "rope_local_base_freq");
    if (of_window.rope_scaling.type != RopeScalingType::none) {
      refuse(fmt::format("{} of type \"{}\"", where, rope_scaling_name(of_window.rope_scaling.type)), "default");
    }
    if (config.sliding_window > 0) config.window_rope_theta = of_window.rope_theta;
  }

  void take_partial_rotation(LlamaConfig& config, double part) const {
    if (!(part > 0.0 && part <= 1.0))
      fail(fmt::format("\"partial_rotary_factor\" is {}: expected above 0, to 1", part));
    const auto elements = static_cast<std::int64_t>(part * static_cast<double>(config.head_dim()));
    if (elements < 2) fail(fmt::format("\"partial_rotary_factor\": {} of heads of {}", part, config.head_dim()));
    config.rotary_dim = elements == config.head_dim() ? 0 : elements;
  }

  /// A key that stands in the file, in the rotary settings, or in both with one value.
  void expect_the_same(const JsonReader& rope, const char* outside_key, const char* inside_key) const {
    if (!has(outside_key)) return;
    const double outside = read.get<double>(outside_key), inside = rope.get_or<double>(inside_key, outside);
    if (inside == outside) return;
    fail(fmt::format("\"{}\" is {}, but {} in {}: expected it once, or the same", outside_key, outside, inside,
                     rope.where().substr(file.size() + 2)));
  }

  void take_rope(LlamaConfig& config, const std::string& key, const nlohmann::json& settings,
                 const char* theta_outside = "rope_theta") const {
    const JsonReader rope(settings, fmt::format("{}: {}", file, key));
    for (const auto& [name, value] : settings.items()) {
      if (value.is_object()) {
        refuse(fmt::format("{} of its own for \"{}\" layers", key, name), "the same for all layers");
      }
    }
    expect_the_same(rope, theta_outside, "rope_theta");
    expect_the_same(rope, "partial_rotary_factor", "partial_rotary_factor");
    if (rope.get_or<std::string>("rope_type", "") != rope.get_or<std::string>("type", "") &&
        !rope.get_or<std::string>("rope_type", "").empty() && !rope.get_or<std::string>("type", "").empty()) {
      fail(fmt::format("{}: \"type\" is \"{}\", but \"rope_type\" is \"{}\": expected one of them, or the same", key,
                       rope.get<std::string>("type"), rope.get<std::string>("rope_type")));
    }
    auto name = rope.get_or<std::string>("rope_type", rope.get_or<std::string>("type", ""));
    if (name.empty() && rope.get_or<double>("factor", 1.0) != 1.0) {
      fail(
          fmt::format("{}: \"factor\" is {}, but \"rope_type\" is not there: expected one of default, linear, dynamic, "
                      "llama3, yarn and longrope",
                      key, rope.get<double>("factor")));
    }
    // Early files of Phi-3 call it so.
    if (config.family == LlamaFamily::phi3 && (name == "su" || name == "yarn")) name = "longrope";
    const auto type = name.empty() ? RopeScalingType::none : rope_scaling_from_name(name);
    if (!type) {
      refuse(fmt::format("{} of type \"{}\"", key, name), "default, linear, dynamic, llama3, yarn or longrope");
    }
    if (const double part = rope.get_or<double>("partial_rotary_factor", 1.0); part != 1.0) {
      if (!config.traits().partial_rotation || config.has_latent_attention()) {
        refuse(fmt::format("\"partial_rotary_factor\": {} in {}", part, key), "1");
      }
      take_partial_rotation(config, part);
    }
    config.rope_theta = rope.get_or<double>("rope_theta", config.rope_theta);
    if (*type == RopeScalingType::none) return;
    if (config.has_latent_attention() && *type != RopeScalingType::yarn &&
        rope.get_or<double>("mscale_all_dim", 0.0) != 0.0) {
      refuse(fmt::format("{} of type \"{}\" with \"mscale_all_dim\"", key, name), "yarn, or none");
    }
    if (config.family == LlamaFamily::phi3 && *type != RopeScalingType::longrope) {
      refuse(fmt::format("{} of type \"{}\" in a model of the family phi3", key, name), "default or longrope");
    }
    RopeScaling scaling{.type = *type};
    if (*type != RopeScalingType::longrope) scaling.factor = rope.get<double>("factor");
    switch (*type) {
      case RopeScalingType::llama3:
        scaling.low_freq_factor = rope.get<double>("low_freq_factor");
        scaling.high_freq_factor = rope.get<double>("high_freq_factor");
        scaling.original_max_seq_len = original_length(config, rope);
        break;
      case RopeScalingType::dynamic: {
        // The file states the length before stretching; the model supports that length times the factor.
        scaling.original_max_seq_len = config.max_seq_len;
        config.max_seq_len = stretched(scaling, key);
        break;
      }
      case RopeScalingType::yarn:
        take_yarn(config, scaling, rope, key);
        break;
      case RopeScalingType::longrope:
        take_longrope(config, scaling, rope);
        break;
      default:
        break;
    }
    config.rope_scaling = scaling;
  }

  std::int64_t stretched(const RopeScaling& scaling, const std::string& key) const {
    const double length = std::floor(scaling.factor * static_cast<double>(scaling.original_max_seq_len));
    if (!(scaling.factor >= 1.0) || !(length < kMostPositions)) {
      fail(fmt::format("{}: \"factor\" is {}: expected 1 or above", key, scaling.factor));
    }
    return static_cast<std::int64_t>(length);
  }

  std::int64_t original_length(const LlamaConfig& config, const JsonReader& rope) const {
    const std::int64_t otherwise = config.family == LlamaFamily::phi3 ? kPhi3OriginalLength : config.max_seq_len;
    if (has(kOriginalLength)) {
      expect_the_same(rope, kOriginalLength, kOriginalLength);
      return read.get<std::int64_t>(kOriginalLength);
    }
    const auto inside = rope.get_or<std::int64_t>(kOriginalLength, otherwise);
    if (config.family == LlamaFamily::phi3 && inside != otherwise) {
      fail(
          fmt::format("\"{}\" is {} in the rotary settings, but not there beside them, where transformers takes {}: "
                      "expected it in both places",
                      kOriginalLength, inside, otherwise));
    }
    return inside;
  }

  void take_yarn(LlamaConfig& config, RopeScaling& scaling, const JsonReader& rope, const std::string& key) const {
    const auto mscale = [&](double times) {
      return scaling.factor <= 1.0 ? 1.0 : 0.1 * times * std::log(scaling.factor) + 1.0;
    };
    scaling.original_max_seq_len = original_length(config, rope);
    const double all = rope.get_or<double>("mscale_all_dim", 0.0), own = rope.get_or<double>("mscale", 0.0);
    const bool has_both = all != 0.0 && own != 0.0;
    if (config.has_latent_attention()) scaling.mscale_all_dim = all;
    scaling.attention_factor =
        rope.get_or<double>("attention_factor", has_both ? mscale(own) / mscale(all) : mscale(1.0));
    const RopeScaling defaults;
    const auto unless_zero = [&](const char* name, double otherwise) {
      const double given = rope.get_or<double>(name, 0.0);
      return given != 0.0 ? given : otherwise;
    };
    scaling.beta_fast = unless_zero("beta_fast", defaults.beta_fast);
    scaling.beta_slow = unless_zero("beta_slow", defaults.beta_slow);
    scaling.truncate = rope.get_or<bool>("truncate", true);
    // Files state the length before or after stretching.
    config.max_seq_len = std::max(config.max_seq_len, stretched(scaling, key));
  }

  void take_longrope(LlamaConfig& config, RopeScaling& scaling, const JsonReader& rope) const {
    scaling.original_max_seq_len = original_length(config, rope);
    scaling.short_factor = rope.get<std::vector<double>>("short_factor");
    scaling.long_factor = rope.get<std::vector<double>>("long_factor");
    const auto original = static_cast<double>(scaling.original_max_seq_len);
    const double factor = rope.get_or<double>("factor", static_cast<double>(config.max_seq_len) / original);
    scaling.attention_factor = rope.get_or<double>(
        "attention_factor", factor <= 1.0 ? 1.0 : std::sqrt(1.0 + std::log(factor) / std::log(original)));
  }
};

/// The "mscale" from which attention_factor = m(mscale) / m(mscale_all_dim) follows, with m(x) = 0.1 x ln(factor) + 1.
double mscale_of(const RopeScaling& rope) {
  if (rope.factor <= 1.0) return rope.mscale_all_dim;
  const double unit = 0.1 * std::log(rope.factor);
  return (rope.attention_factor * (rope.mscale_all_dim * unit + 1.0) - 1.0) / unit;
}

nlohmann::json scaling_keys(const RopeScaling& rope) {
  nlohmann::json scaling = {{"rope_type", rope_scaling_name(rope.type)}};
  if (rope.type != RopeScalingType::longrope) scaling["factor"] = rope.factor;
  if (rope.type == RopeScalingType::llama3) {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
    scaling[kOriginalLength] = rope.original_max_seq_len;
  }
  if (rope.type == RopeScalingType::yarn) {
    scaling["attention_factor"] = rope.attention_factor;
    scaling["beta_fast"] = rope.beta_fast;
    scaling["beta_slow"] = rope.beta_slow;
    if (rope.mscale_all_dim != 0.0) {
      scaling["mscale_all_dim"] = rope.mscale_all_dim;
      scaling["mscale"] = mscale_of(rope);  // for programs that do not know attention_factor
    }
    if (!rope.truncate) scaling["truncate"] = false;
    scaling[kOriginalLength] = rope.original_max_seq_len;
  }
  if (rope.type == RopeScalingType::longrope) {
    scaling["attention_factor"] = rope.attention_factor;
    scaling["short_factor"] = rope.short_factor;
    scaling["long_factor"] = rope.long_factor;
    scaling[kOriginalLength] = rope.original_max_seq_len;
  }
  return scaling;
}

/// rotary_dim / head_dim, so that transformers gets rotary_dim of it, which it rounds down.
double rotated_share(const LlamaConfig& config) {
  const auto head = static_cast<double>(config.head_dim());
  const double share = static_cast<double>(config.rotary_dim) / head;
  const bool is_below = static_cast<std::int64_t>(share * head) < config.rotary_dim;
  return is_below ? std::nextafter(share, 1.0) : share;
}

void add_llama_keys(nlohmann::json& description, const LlamaConfig& config) {
  const HfFamily& form = hf_family(config.family);
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
                      {form.activation_key, form.activation}});
  if (form.write != nullptr) form.write(description, config);
  if (config.window_rope_theta != 0.0) description["rope_local_base_freq"] = config.window_rope_theta;
  if (config.rotary_dim != 0 && !config.has_latent_attention())
    description["partial_rotary_factor"] = rotated_share(config);
  if (rope.type != RopeScalingType::none) description["rope_scaling"] = scaling_keys(rope);
  if (config.family == LlamaFamily::phi3 && rope.type == RopeScalingType::longrope) {
    description[kOriginalLength] = rope.original_max_seq_len;
  }
}

}  // namespace

const char* hf_architecture(LlamaFamily family) { return hf_family(family).architecture; }

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
