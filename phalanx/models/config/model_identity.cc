#include "phalanx/models/config/model_identity.h"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>

#include "phalanx/models/config/llama_json.h"

namespace phalanx::models {

namespace {

const char* activation_name(const LlamaConfig& config) {
  if (config.is_gpt2()) return "gelu_new";
  switch (config.traits().activation) {
    case GatedActivation::gelu_tanh:
      return "gelu_tanh";
    case GatedActivation::clamped_silu:
      return "clamped_silu";
    default:
      return "silu";
  }
}

}  // namespace

nlohmann::json model_identity(const LlamaConfig& config) {
  nlohmann::json model = {{"family", family_name(config.family)},
                          {"dim", config.dim},
                          {"n_layers", config.n_layers},
                          {"n_heads", config.n_heads},
                          {"n_kv_heads", config.n_kv_heads},
                          {"head_dim", config.head_dim()},
                          {"ffn_hidden", config.ffn_hidden},
                          {"vocab_size", config.vocab_size},
                          {"norm", config.is_gpt2()                ? "layer"
                                   : config.traits().norms_add_one ? "rms_one_plus"
                                                                   : "rms"},
                          {"norm_eps", config.norm_eps},
                          {"activation", activation_name(config)},
                          {"tie_embeddings", config.tie_embeddings},
                          {"qkv_bias", config.has_qkv_bias()},
                          {"qk_norm", config.has_qk_norm()},
                          {"sliding_window", config.sliding_window},
                          {"experts", config.experts},
                          {"experts_per_token", config.experts_per_token}};
  // Where a family is not as most are.
  if (config.traits().norms != NormPlacement::before) {
    model["norms"] = config.traits().norms == NormPlacement::after ? "after" : "both";
  }
  if (config.traits().qk_norm == QkNorm::all_heads) model["qk_norm_over"] = "all_heads";
  if (config.is_gpt2()) {  // positions are learnt
    model["max_seq_len"] = config.max_seq_len;
    return model;
  }
  if (!config.normalise_routing) model["normalise_routing"] = false;
  if (!config.full_layers.empty()) model["full_layers"] = config.full_layers;
  if (!config.unrotated_layers.empty()) model["unrotated_layers"] = config.unrotated_layers;
  if (config.query_scalar != 0.0) model["query_scalar"] = config.query_scalar;
  if (config.activation_limit != 0.0) model["activation_limit"] = config.activation_limit;
  if (config.traits().multipliers) {
    model.update({{"embedding_multiplier", config.embedding_multiplier},
                  {"residual_multiplier", config.residual_multiplier},
                  {"attention_multiplier", config.attention_multiplier},
                  {"logits_scaling", config.logits_scaling}});
  }
  if (config.has_sinks()) model["sinks"] = true;
  if (config.has_output_bias()) model["output_bias"] = true;
  if (config.has_expert_net_biases()) model["expert_biases"] = true;
  if (config.has_latent_attention()) {
    model.update({{"kv_lora_rank", config.kv_lora_rank},
                  {"q_lora_rank", config.q_lora_rank},
                  {"v_head_dim", config.v_head_dim},
                  {"dense_layers", config.dense_layers},
                  {"dense_hidden", config.dense_hidden},
                  {"shared_experts", config.shared_experts},
                  {"expert_groups", config.expert_groups},
                  {"groups_per_token", config.groups_per_token},
                  {"routed_scaling", config.routed_scaling}});
  }
  const RopeScaling& scaling = config.rope_scaling;
  nlohmann::json& rope = model["rope"];
  rope = {{"theta", config.rope_theta}, {"scaling", rope_scaling_name(scaling.type)}};
  if (config.window_rope_theta != 0.0) rope["window_theta"] = config.window_rope_theta;
  if (config.rotary_dim != 0) rope["rotary_dim"] = config.rotary_dim;
  if (scaling.type == RopeScalingType::none) return model;
  if (scaling.attention_factor != 1.0) rope["attention_factor"] = scaling.attention_factor;
  rope["factor"] = scaling.factor;
  if (scaling.type == RopeScalingType::linear) return model;
  rope["original_max_seq_len"] = scaling.original_max_seq_len;
  if (scaling.type == RopeScalingType::llama3) {
    rope["low_freq_factor"] = scaling.low_freq_factor;
    rope["high_freq_factor"] = scaling.high_freq_factor;
  }
  if (scaling.type == RopeScalingType::yarn) {
    rope.update({{"beta_fast", scaling.beta_fast}, {"beta_slow", scaling.beta_slow}, {"truncate", scaling.truncate}});
    if (scaling.mscale_all_dim != 0.0) rope["mscale_all_dim"] = scaling.mscale_all_dim;
  }
  if (scaling.type == RopeScalingType::longrope) {
    rope.update({{"short_factor", scaling.short_factor}, {"long_factor", scaling.long_factor}});
  }
  return model;
}

std::vector<JsonDifference> model_differences(const LlamaConfig& saved, const LlamaConfig& found) {
  return json_differences(model_identity(saved), model_identity(found));
}

bool have_same_shapes(const nlohmann::json& saved, const nlohmann::json& found) {
  const auto rows_of = [](const nlohmann::json& model, const char* heads) {
    return model.value(heads, std::int64_t{0}) * model.value("head_dim", std::int64_t{0});
  };
  const auto of = [](const nlohmann::json& model, const char* key) { return model.value(key, nlohmann::json()); };
  const auto is_same = [&](const char* key) { return of(saved, key) == of(found, key); };
  for (const char* key : {"dim",           "n_layers",       "ffn_hidden",    "vocab_size",   "norm",
                          "norms",         "tie_embeddings", "qkv_bias",      "qk_norm",      "qk_norm_over",
                          "sinks",         "output_bias",    "expert_biases", "experts",      "max_seq_len",
                          "kv_lora_rank",  "q_lora_rank",    "v_head_dim",    "dense_layers", "dense_hidden",
                          "shared_experts"}) {
    if (!is_same(key)) return false;
  }
  // Heads' parts are rows of one matrix.
  const bool is_latent = !of(saved, "kv_lora_rank").is_null();
  if (is_latent && !(is_same("n_heads") && is_same("head_dim"))) return false;
  if (is_latent &&
      saved.at("rope").value("rotary_dim", 0) != found.value("rope", nlohmann::json::object()).value("rotary_dim", 0)) {
    return false;
  }
  const bool is_by_head = of(saved, "qk_norm") == true && of(saved, "qk_norm_over").is_null();
  if (is_by_head && !is_same("head_dim")) return false;
  return rows_of(saved, "n_heads") == rows_of(found, "n_heads") &&
         rows_of(saved, "n_kv_heads") == rows_of(found, "n_kv_heads");
}

std::string model_differences_text(const std::vector<JsonDifference>& differences) {
  std::string text;
  for (const auto& [key, saved, found] : differences) {
    text += fmt::format("\n  {}: the weights were saved with {}, this model has {}", key, json_value_text(saved),
                        json_value_text(found));
  }
  return text;
}

}  // namespace phalanx::models
