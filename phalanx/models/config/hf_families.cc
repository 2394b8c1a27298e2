#include "phalanx/models/config/hf_families.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

namespace phalanx::models {
namespace {

constexpr double kSigmoidGain = 1.702;  // of kernels/clamped_swiglu.h

void write_window(nlohmann::json& description, const LlamaConfig& config) {
  description["sliding_window"] = nullptr;
  if (config.sliding_window > 0) description["sliding_window"] = config.sliding_window;
}

nlohmann::json layer_types(const LlamaConfig& config) {
  nlohmann::json types = nlohmann::json::array();
  for (std::int64_t layer = 0; layer < config.n_layers; ++layer) {
    types.push_back(config.window_of(layer) > 0 ? "sliding_attention" : "full_attention");
  }
  return types;
}

/// The window that some layers have, or none: `full` are those without it.
void set_window(LlamaConfig& config, std::int64_t window, std::vector<std::int64_t> full) {
  if (std::ssize(full) == config.n_layers) return;
  config.sliding_window = window;
  if (window > 0) config.full_layers = std::move(full);
}

void read_mistral(const HfConfigFile& file, LlamaConfig& config) {
  constexpr std::int64_t kWindow = 4096;
  config.sliding_window =
      file.json.contains("sliding_window") ? file.read.get_or<std::int64_t>("sliding_window", 0) : kWindow;
}

/// Layers from max_window_layers on have the window, if it is enabled. layer_types says the same for each layer.
void read_qwen(const HfConfigFile& file, LlamaConfig& config) {
  const bool on = file.read.get_or<bool>("use_sliding_window", false);
  std::vector<std::int64_t> full;
  if (file.has("layer_types")) {
    full = file.full_layers(config.n_layers);
    if (!on && std::ssize(full) != config.n_layers) {
      file.fail(
          fmt::format("\"layer_types\" gives {} of {} layers a sliding window, but \"use_sliding_window\" is false: "
                      "expected true, or \"full_attention\" alone",
                      config.n_layers - std::ssize(full), config.n_layers));
    }
  } else {
    const auto first = file.read.get_or<std::int64_t>("max_window_layers", 28);
    for (std::int64_t layer = 0; layer < std::min(first, config.n_layers); ++layer) full.push_back(layer);
  }
  if (on && std::ssize(full) < config.n_layers) {
    set_window(config, file.read.get<std::int64_t>("sliding_window"), std::move(full));
  }
}

void write_qwen(nlohmann::json& description, const LlamaConfig& config) {
  const bool on = config.sliding_window > 0;
  description["use_sliding_window"] = on;
  description["max_window_layers"] = on ? std::ssize(config.full_layers) : config.n_layers;
  if (!on) return;
  description["sliding_window"] = config.sliding_window;
  if (!config.full_layers.empty()) description["layer_types"] = layer_types(config);
}

void read_mixtral(const HfConfigFile& file, LlamaConfig& config) {
  config.sliding_window = file.read.get_or<std::int64_t>("sliding_window", 0);
  config.experts = file.read.get<std::int64_t>("num_local_experts");
  config.experts_per_token = file.read.get_or<std::int64_t>("num_experts_per_tok", 2);
}

void write_mixtral(nlohmann::json& description, const LlamaConfig& config) {
  write_window(description, config);
  description["num_local_experts"] = config.experts;
  description["num_experts_per_tok"] = config.experts_per_token;
}

void read_qwen3_moe(const HfConfigFile& file, LlamaConfig& config) {
  if (file.has("mlp_only_layers") && !file.read.array("mlp_only_layers").empty()) {
    file.refuse("\"mlp_only_layers\" of some layers", "experts in all layers, [] or no such key");
  }
  if (const auto step = file.read.get_or<std::int64_t>("decoder_sparse_step", 1); step != 1) {
    file.refuse(fmt::format("\"decoder_sparse_step\": {}", step), "experts in all layers, 1");
  }
  if (file.read.get_or<bool>("use_sliding_window", false)) {
    config.sliding_window = file.read.get<std::int64_t>("sliding_window");
  }
  const bool is_local = !file.has("num_experts") && file.has("num_local_experts");
  config.experts = file.read.get<std::int64_t>(is_local ? "num_local_experts" : "num_experts");
  config.experts_per_token = file.read.get_or<std::int64_t>("num_experts_per_tok", 8);
  config.ffn_hidden = file.read.get_or<std::int64_t>("moe_intermediate_size", 768);
  config.normalise_routing = file.read.get_or<bool>("norm_topk_prob", false);
}

void write_qwen3_moe(nlohmann::json& description, const LlamaConfig& config) {
  description["use_sliding_window"] = config.sliding_window > 0;
  if (config.sliding_window > 0) description["sliding_window"] = config.sliding_window;
  description["num_experts"] = config.experts;
  description["num_experts_per_tok"] = config.experts_per_token;
  description["moe_intermediate_size"] = config.ffn_hidden;
  description["norm_topk_prob"] = config.normalise_routing;
  description["decoder_sparse_step"] = 1;
  description["mlp_only_layers"] = nlohmann::json::array();
}

/// no_rope_layers has a 0 for each layer without a rotary embedding; the others have 1.
void read_smollm3(const HfConfigFile& file, LlamaConfig& config) {
  if (file.has("no_rope_layers")) {
    const auto rotated = file.read.get<std::vector<std::int64_t>>("no_rope_layers");
    if (std::ssize(rotated) < config.n_layers) {
      file.fail(fmt::format("\"no_rope_layers\" names {} layers, but \"num_hidden_layers\" is {}", rotated.size(),
                            config.n_layers));
    }
    for (std::int64_t layer = 0; layer < config.n_layers; ++layer) {
      if (rotated[static_cast<std::size_t>(layer)] == 0) config.unrotated_layers.push_back(layer);
    }
  } else {
    const auto every = file.read.get_or<std::int64_t>("no_rope_layer_interval", 4);
    if (every < 1) file.read.fail("no_rope_layer_interval", "1 or more");
    for (std::int64_t layer = every - 1; layer < config.n_layers; layer += every) {
      config.unrotated_layers.push_back(layer);
    }
  }
  const bool on = file.read.get_or<bool>("use_sliding_window", false) && file.has("sliding_window");
  if (file.has("layer_types")) {
    const auto full = file.full_layers(config.n_layers);
    if (std::ssize(full) == config.n_layers) return;
    if (!on) file.fail("\"layer_types\" gives layers a sliding window, but \"use_sliding_window\" is false");
    set_window(config, file.read.get<std::int64_t>("sliding_window"), full);
    return;
  }
  if (!on) return;
  std::vector<std::int64_t> full;
  for (std::int64_t layer = 0; layer < config.n_layers; ++layer) {
    if (config.is_rotated(layer)) full.push_back(layer);
  }
  set_window(config, file.read.get<std::int64_t>("sliding_window"), std::move(full));
}

void write_smollm3(nlohmann::json& description, const LlamaConfig& config) {
  nlohmann::json rotated = nlohmann::json::array();
  for (std::int64_t layer = 0; layer < config.n_layers; ++layer) rotated.push_back(config.is_rotated(layer) ? 1 : 0);
  description["no_rope_layers"] = rotated;
  description["use_sliding_window"] = config.sliding_window > 0;
  description["layer_types"] = layer_types(config);
  write_window(description, config);
}

void read_phi3(const HfConfigFile& file, LlamaConfig& config) {
  config.sliding_window = file.read.get_or<std::int64_t>("sliding_window", 0);
}

void read_gemma3(const HfConfigFile& file, LlamaConfig& config) {
  std::vector<std::int64_t> full;
  if (file.has("layer_types")) {
    full = file.full_layers(config.n_layers);
  } else {
    const auto every = file.read.get_or<std::int64_t>("sliding_window_pattern", 6);
    if (every < 1) file.read.fail("sliding_window_pattern", "1 or more");
    for (std::int64_t layer = every - 1; layer < config.n_layers; layer += every) full.push_back(layer);
  }
  if (file.json.contains("sliding_window") && !file.has("sliding_window")) {
    file.refuse("\"sliding_window\": null in a model with sliding layers", "a number of positions");
  }
  set_window(config, file.read.get_or<std::int64_t>("sliding_window", 4096), std::move(full));
  config.query_scalar = file.read.get_or<double>("query_pre_attn_scalar", 256.0);
}

void write_gemma3(nlohmann::json& description, const LlamaConfig& config) {
  write_window(description, config);
  description["layer_types"] = layer_types(config);
  // transformers expects a whole number.
  const double scalar = config.query_scalar != 0.0 ? config.query_scalar : static_cast<double>(config.head_dim());
  description["query_pre_attn_scalar"] = scalar;
  if (std::floor(scalar) == scalar) description["query_pre_attn_scalar"] = static_cast<std::int64_t>(scalar);
}

/// Keys with one accepted value: anything else would be another model.
void expect_value(const HfConfigFile& file, const char* key, const char* value) {
  if (const auto found = file.read.get_or<std::string>(key, value); found != value) {
    file.refuse(fmt::format("\"{}\": \"{}\"", key, found), fmt::format("\"{}\"", value));
  }
}

/// Of weights in 8 bits those that are read: DeepSeek-V3's.
void check_quantization(const HfConfigFile& file) {
  if (!file.has("quantization_config")) return;
  const nlohmann::json& given = file.json.at("quantization_config");
  const auto is = [&](const char* key, const nlohmann::json& value) {
    return given.is_object() && given.value(key, nlohmann::json()) == value;
  };
  const bool has_blocks = is("weight_block_size", nlohmann::json::array({128, 128}));
  if (is("quant_method", "fp8") && has_blocks && (is("fmt", "e4m3") || !given.contains("fmt"))) return;
  file.refuse("\"quantization_config\"",
              "a model without it, or \"quant_method\": \"fp8\" with \"weight_block_size\": [128, 128]");
}

void read_deepseek(const HfConfigFile& file, LlamaConfig& config) {
  const bool is_v3 = config.family == LlamaFamily::deepseek_v3;
  // transformers has other values for a missing key than for null, or for other versions.
  for (const char* key : {"q_lora_rank", "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor"}) {
    if (!file.json.contains(key)) file.fail(fmt::format("has no \"{}\"", key));
  }
  for (const char* key : {"rope_interleave", "norm_topk_prob"}) {
    if (file.json.contains(key) && !file.has(key)) file.refuse(fmt::format("\"{}\": null", key), "true or false");
  }
  config.q_lora_rank = file.read.get_or<std::int64_t>("q_lora_rank", 0);
  config.kv_lora_rank = file.read.get<std::int64_t>("kv_lora_rank");
  config.v_head_dim = file.read.get<std::int64_t>("v_head_dim");
  config.rotary_dim = file.read.get<std::int64_t>("qk_rope_head_dim");
  config.own_head_dim = file.read.get<std::int64_t>("qk_nope_head_dim") + config.rotary_dim;
  if (!file.read.get_or<bool>("rope_interleave", true)) file.refuse("\"rope_interleave\": false", "true");
  config.experts = file.read.get<std::int64_t>(file.has("n_routed_experts") ? "n_routed_experts" : "num_local_experts");
  config.experts_per_token = file.read.get<std::int64_t>("num_experts_per_tok");
  config.ffn_hidden = file.read.get<std::int64_t>("moe_intermediate_size");
  config.shared_experts = file.read.get_or<std::int64_t>("n_shared_experts", 0);
  config.dense_layers = std::min(file.read.get_or<std::int64_t>("first_k_dense_replace", 0), config.n_layers);
  if (config.dense_layers > 0) config.dense_hidden = file.read.get<std::int64_t>("intermediate_size");
  if (const auto every = file.read.get_or<std::int64_t>("moe_layer_freq", 1); every != 1) {
    file.refuse(fmt::format("\"moe_layer_freq\": {}", every), "experts in all layers behind the first ones, 1");
  }
  config.routed_scaling = file.read.get_or<double>("routed_scaling_factor", 1.0);
  expect_value(file, "scoring_func", is_v3 ? "sigmoid" : "softmax");
  const auto method = file.read.get_or<std::string>("topk_method", is_v3 ? "noaux_tc" : "greedy");
  const bool has_groups = is_v3 || method == "group_limited_greedy";
  if (is_v3) {
    check_quantization(file);
    expect_value(file, "topk_method", "noaux_tc");
    config.normalise_routing = file.read.get_or<bool>("norm_topk_prob", true);
  } else {
    if (!has_groups && method != "greedy") {
      file.refuse(fmt::format("\"topk_method\": \"{}\"", method), "\"greedy\" or \"group_limited_greedy\"");
    }
    if (file.read.get_or<bool>("norm_topk_prob", false)) file.refuse("\"norm_topk_prob\": true", "false");
    config.normalise_routing = false;
  }
  if (!has_groups) return;
  config.expert_groups = file.read.get<std::int64_t>("n_group");
  config.groups_per_token = file.read.get<std::int64_t>("topk_group");
  if (config.groups_per_token < 1 || config.groups_per_token > config.expert_groups) {
    file.fail(
        fmt::format("\"n_group\" is {} and \"topk_group\" {}: expected 1 or more groups, and as many or fewer of a "
                    "token",
                    config.expert_groups, config.groups_per_token));
  }
  if (config.expert_groups == 1) config.expert_groups = config.groups_per_token = 0;  // all experts
}

void write_deepseek(nlohmann::json& description, const LlamaConfig& config) {
  const bool is_v3 = config.family == LlamaFamily::deepseek_v3;
  description["head_dim"] = config.rotary_dim;
  description["q_lora_rank"] = nullptr;
  if (config.q_lora_rank != 0) description["q_lora_rank"] = config.q_lora_rank;
  description.update({{"kv_lora_rank", config.kv_lora_rank},
                      {"v_head_dim", config.v_head_dim},
                      {"qk_rope_head_dim", config.rotary_dim},
                      {"qk_nope_head_dim", config.head_dim() - config.rotary_dim},
                      {"n_routed_experts", config.experts},
                      {"num_experts_per_tok", config.experts_per_token},
                      {"moe_intermediate_size", config.ffn_hidden},
                      {"intermediate_size", config.dense_units()},
                      {"n_shared_experts", config.shared_experts},
                      {"first_k_dense_replace", config.dense_layers},
                      {"moe_layer_freq", 1},
                      {"routed_scaling_factor", config.routed_scaling},
                      {"scoring_func", is_v3 ? "sigmoid" : "softmax"},
                      {"norm_topk_prob", config.normalise_routing},
                      {"attention_bias", false}});
  const bool has_groups = config.expert_groups > 0;
  description["topk_method"] = is_v3 ? "noaux_tc" : has_groups ? "group_limited_greedy" : "greedy";
  if (!is_v3 && !has_groups) return;
  description["n_group"] = has_groups ? config.expert_groups : 1;
  description["topk_group"] = has_groups ? config.groups_per_token : 1;
}

/// Of weights in 4 bits those that are read: GPT-OSS's.
void check_mxfp4(const HfConfigFile& file) {
  if (!file.has("quantization_config")) return;
  const nlohmann::json& given = file.json.at("quantization_config");
  if (given.is_object() && given.value("quant_method", nlohmann::json()) == "mxfp4") return;
  file.refuse("\"quantization_config\"", "a model without it, or \"quant_method\": \"mxfp4\"");
}

void read_gpt_oss(const HfConfigFile& file, LlamaConfig& config) {
  check_mxfp4(file);
  if (!file.read.get_or<bool>("attention_bias", true)) file.refuse("\"attention_bias\": false", "true");
  // transformers would stretch the rotary embedding of a model that does not say.
  if (!file.has("rope_scaling") && !file.has("rope_parameters")) {
    file.fail("has neither \"rope_scaling\" nor \"rope_parameters\": expected one of them");
  }
  config.experts = file.read.get<std::int64_t>("num_local_experts");
  config.experts_per_token =
      file.read.get<std::int64_t>(file.has("num_experts_per_tok") ? "num_experts_per_tok" : "experts_per_token");
  if (file.has("experts_per_token") && file.read.get<std::int64_t>("experts_per_token") != config.experts_per_token) {
    file.fail("\"experts_per_token\" and \"num_experts_per_tok\" differ: expected one of them, or the same");
  }
  config.activation_limit = file.read.get_or<double>("swiglu_limit", 7.0);
  if (const double gain = file.read.get_or<double>("swiglu_alpha", kSigmoidGain); gain != kSigmoidGain) {
    file.refuse(fmt::format("\"swiglu_alpha\": {}", gain), fmt::format("{}", kSigmoidGain));
  }
  std::vector<std::int64_t> full;
  if (file.has("layer_types")) {
    full = file.full_layers(config.n_layers);
  } else {
    for (std::int64_t layer = 1; layer < config.n_layers; layer += 2) full.push_back(layer);
  }
  if (std::ssize(full) == config.n_layers) return;
  if (file.json.contains("sliding_window") && !file.has("sliding_window")) {
    file.refuse("\"sliding_window\": null in a model with sliding layers", "a number of positions");
  }
  const auto window = file.read.get_or<std::int64_t>("sliding_window", 128);
  if (window < 1) file.refuse(fmt::format("\"sliding_window\": {}", window), "a number of positions");
  set_window(config, window, std::move(full));
}

void write_gpt_oss(nlohmann::json& description, const LlamaConfig& config) {
  description.update({{"attention_bias", true},
                      {"num_local_experts", config.experts},
                      {"num_experts_per_tok", config.experts_per_token},
                      {"swiglu_limit", config.activation_limit},
                      {"swiglu_alpha", kSigmoidGain},
                      {"layer_types", layer_types(config)}});
  if (config.sliding_window > 0) description["sliding_window"] = config.sliding_window;
  if (config.rope_scaling.type != RopeScalingType::none) return;
  description["rope_scaling"] = {{"rope_type", "default"}, {"rope_theta", config.rope_theta}};
}

void read_granite(const HfConfigFile& file, LlamaConfig& config) {
  config.embedding_multiplier = file.read.get_or<double>("embedding_multiplier", 1.0);
  config.residual_multiplier = file.read.get_or<double>("residual_multiplier", 1.0);
  config.attention_multiplier = file.read.get_or<double>("attention_multiplier", 1.0);
  config.logits_scaling = file.read.get_or<double>("logits_scaling", 1.0);
  if (!(config.attention_multiplier > 0)) {
    file.refuse(fmt::format("\"attention_multiplier\": {}", config.attention_multiplier), "a number above 0");
  }
}

void write_granite(nlohmann::json& description, const LlamaConfig& config) {
  const double of_head = 1.0 / std::sqrt(static_cast<double>(config.head_dim()));
  description.update(
      {{"embedding_multiplier", config.embedding_multiplier},
       {"residual_multiplier", config.residual_multiplier},
       {"attention_multiplier", config.attention_multiplier != 0.0 ? config.attention_multiplier : of_head},
       {"logits_scaling", config.logits_scaling}});
}

void write_llama(nlohmann::json& description, const LlamaConfig& /*config*/) {
  description["attention_bias"] = false;
  description["mlp_bias"] = false;
}

std::vector<std::string_view> deepseek_keys(bool is_v3) {
  std::vector<std::string_view> keys = {"q_lora_rank",
                                        "kv_lora_rank",
                                        "v_head_dim",
                                        "qk_rope_head_dim",
                                        "qk_nope_head_dim",
                                        "rope_interleave",
                                        "n_routed_experts",
                                        "num_local_experts",
                                        "num_experts_per_tok",
                                        "n_shared_experts",
                                        "first_k_dense_replace",
                                        "moe_layer_freq",
                                        "moe_intermediate_size",
                                        "scoring_func",
                                        "topk_method",
                                        "norm_topk_prob",
                                        "n_group",
                                        "topk_group",
                                        "routed_scaling_factor",
                                        "num_nextn_predict_layers"};
  if (is_v3) keys.emplace_back("quantization_config");
  return keys;
}

std::vector<std::pair<std::string_view, std::string_view>> deepseek_names() {
  return {{"attention.wq_a.weight", "self_attn.q_a_proj.weight"},
          {"attention.q_norm.weight", "self_attn.q_a_layernorm.weight"},
          {"attention.wq_b.weight", "self_attn.q_b_proj.weight"},
          {"attention.wkv_a.weight", "self_attn.kv_a_proj_with_mqa.weight"},
          {"attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight"},
          {"attention.wkv_b.weight", "self_attn.kv_b_proj.weight"},
          {"moe.gate.weight", "mlp.gate.weight"},
          {"moe.expert_bias", "mlp.gate.e_score_correction_bias"},
          {"moe.experts.", "mlp.experts."},
          {"moe.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight"},
          {"moe.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"},
          {"moe.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight"}};
}

const std::vector<HfFamily>& families() {
  // In the order of LlamaFamily.
  static const std::vector<HfFamily> table = {
      {.family = LlamaFamily::llama,
       .architecture = "LlamaForCausalLM",
       .kv_heads_default = true,
       .write = write_llama},
      {.family = LlamaFamily::mistral,
       .architecture = "MistralForCausalLM",
       .keys = {"sliding_window"},
       .read = read_mistral,
       .write = write_window},
      {.family = LlamaFamily::qwen2,
       .architecture = "Qwen2ForCausalLM",
       .keys = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
       .read = read_qwen,
       .write = write_qwen},
      {.family = LlamaFamily::qwen3,
       .architecture = "Qwen3ForCausalLM",
       .keys = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
       .head_dim = 128,
       .read = read_qwen,
       .write = write_qwen},
      {.family = LlamaFamily::gpt2, .architecture = "GPT2LMHeadModel"},  // hf_gpt2_config.h
      {.family = LlamaFamily::mixtral,
       .architecture = "MixtralForCausalLM",
       .keys = {"sliding_window", "num_local_experts", "num_experts_per_tok"},
       .norm_eps = 1e-5,
       .rope_theta = 1e6,
       .read = read_mixtral,
       .write = write_mixtral},
      {.family = LlamaFamily::qwen3_moe,
       .architecture = "Qwen3MoeForCausalLM",
       .keys = {"sliding_window", "use_sliding_window", "num_experts", "num_local_experts", "num_experts_per_tok",
                "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"},
       .experts_have_units = true,
       .read = read_qwen3_moe,
       .write = write_qwen3_moe,
       .names = {{"moe.gate.weight", "mlp.gate.weight"}, {"moe.experts.", "mlp.experts."}}},
      {.family = LlamaFamily::olmo2,
       .architecture = "Olmo2ForCausalLM",
       .norm_eps = 1e-5,
       .kv_heads_default = true,
       .names = {{"attention_norm.weight", "post_attention_layernorm.weight"},
                 {"ffn_norm.weight", "post_feedforward_layernorm.weight"}}},
      {.family = LlamaFamily::smollm3,
       .architecture = "SmolLM3ForCausalLM",
       .keys = {"no_rope_layers", "no_rope_layer_interval", "sliding_window", "use_sliding_window", "layer_types"},
       .rope_theta = 2e6,
       .tied = true,
       .read = read_smollm3,
       .write = write_smollm3},
      {.family = LlamaFamily::phi3,
       .architecture = "Phi3ForCausalLM",
       .keys = {"sliding_window", "original_max_position_embeddings"},
       .norm_eps = 1e-5,
       .kv_heads_default = true,
       .read = read_phi3,
       .write = write_window},
      {.family = LlamaFamily::gemma3_text,
       .architecture = "Gemma3ForCausalLM",
       .keys = {"sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "layer_types",
                "query_pre_attn_scalar", "rope_local_base_freq", "hidden_activation"},
       .rope_theta = 1e6,
       .tied = true,
       .head_dim = 256,
       .activation_key = "hidden_activation",
       .activation = "gelu_pytorch_tanh",
       .read = read_gemma3,
       .write = write_gemma3,
       .names = {{"attention_post_norm.weight", "post_attention_layernorm.weight"},
                 {"ffn_norm.weight", "pre_feedforward_layernorm.weight"},
                 {"ffn_post_norm.weight", "post_feedforward_layernorm.weight"}}},
      {.family = LlamaFamily::deepseek_v2,
       .architecture = "DeepseekV2ForCausalLM",
       .keys = deepseek_keys(/*is_v3=*/false),
       .experts_have_units = true,
       .kv_heads_default = true,
       .read = read_deepseek,
       .write = write_deepseek,
       .names = deepseek_names()},
      {.family = LlamaFamily::deepseek_v3,
       .architecture = "DeepseekV3ForCausalLM",
       .keys = deepseek_keys(/*is_v3=*/true),
       .experts_have_units = true,
       .kv_heads_default = true,
       .read = read_deepseek,
       .write = write_deepseek,
       .names = deepseek_names()},
      {.family = LlamaFamily::gpt_oss,
       .architecture = "GptOssForCausalLM",
       .keys = {"num_local_experts", "num_experts_per_tok", "experts_per_token", "swiglu_limit", "swiglu_alpha",
                "sliding_window", "layer_types", "quantization_config", "attention_bias", "initial_context_length"},
       .norm_eps = 1e-5,
       .rope_theta = 150000.0,
       .head_dim = 64,
       .read = read_gpt_oss,
       .write = write_gpt_oss,
       .names = {{"attention.wo.bias", "self_attn.o_proj.bias"},
                 {"attention.sinks", "self_attn.sinks"},
                 {"moe.gate.weight", "mlp.router.weight"},
                 {"moe.gate.bias", "mlp.router.bias"}}},
      {.family = LlamaFamily::granite,
       .architecture = "GraniteForCausalLM",
       .keys = {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
       .kv_heads_default = true,
       .read = read_granite,
       .write = write_granite},
  };
  return table;
}

}  // namespace

const HfFamily& hf_family(LlamaFamily family) { return families()[static_cast<std::size_t>(family)]; }

void HfConfigFile::refuse(const std::string& what, const std::string& expected) const {
  throw CheckpointError(fmt::format("{}: {} is not supported; expected {}", file, what, expected));
}

void HfConfigFile::fail(const std::string& what) const { throw CheckpointError(fmt::format("{}: {}", file, what)); }

std::vector<std::int64_t> HfConfigFile::full_layers(std::int64_t n_layers) const {
  const auto types = read.get<std::vector<std::string>>("layer_types");
  if (std::ssize(types) != n_layers) {
    fail(fmt::format("\"layer_types\" names {} layers, but \"num_hidden_layers\" is {}", types.size(), n_layers));
  }
  std::vector<std::int64_t> full;
  for (std::int64_t layer = 0; layer < n_layers; ++layer) {
    const std::string& type = types[static_cast<std::size_t>(layer)];
    if (type != "full_attention" && type != "sliding_attention") {
      refuse(fmt::format("a layer of type \"{}\"", type), "\"full_attention\" or \"sliding_attention\"");
    }
    if (type == "full_attention") full.push_back(layer);
  }
  return full;
}

}  // namespace phalanx::models
