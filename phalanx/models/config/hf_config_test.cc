#include "phalanx/models/config/hf_config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/config/testing/tiny_hf_config.h"

namespace phalanx::models {
namespace {

LlamaConfig read_config(const nlohmann::json& description) {
  return llama_config_from_hf(description.dump(), "config.json");
}

std::string config_error(const nlohmann::json& description) {
  return error_text<CheckpointError>([&] { read_config(description); });
}

/// The description with one key changed.
std::string config_error(const char* key, const nlohmann::json& value, const char* type = "llama") {
  auto config = tiny_hf_config();
  config["model_type"] = type;
  config[key] = value;
  return config_error(config);
}

TEST(HfConfig, EndTokensAreOneOrSeveral) {
  const auto ends = [](const std::string& text) { return hf_end_tokens(text, "f.json"); };
  EXPECT_THAT(ends(R"({"eos_token_id": 2})"), ElementsAre(2));
  EXPECT_THAT(ends(R"({"eos_token_id": [128001, 128009]})"), ElementsAre(128001, 128009));
  EXPECT_TRUE(ends(R"({"eos_token_id": null})").empty());
  EXPECT_TRUE(ends("{}").empty());
  const auto refused = [&](const std::string& text) { return error_text<CheckpointError>([&] { ends(text); }); };
  for (const char* wrong : {R"({"eos_token_id": "x"})", R"({"eos_token_id": [1, -1]})", R"({"eos_token_id": 1.5})"}) {
    EXPECT_THAT(refused(wrong), HasSubstr("f.json: \"eos_token_id\" is")) << wrong;
  }
  EXPECT_THAT(refused("["), HasSubstr("f.json: not valid JSON at column 2"));
}

TEST(HfConfig, HuggingFacesDefaultsAreTakenForWhatIsNotSaid) {
  auto description = tiny_hf_config();
  for (const char* key : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"}) {
    description.erase(key);
  }
  const auto config = read_config(description);
  EXPECT_EQ(config.n_kv_heads, config.n_heads);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_FALSE(config.tie_embeddings);
  description["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  EXPECT_EQ(read_config(description).rope_theta, 5e5);
}

TEST(HfConfig, HuggingFaceModelsThatCannotBeRunAreRefusedByName) {
  EXPECT_EQ(config_error("torch_dtype", "bfloat16"), "");
  EXPECT_EQ(
      config_error("model_type", "gpt_neox"),
      "config.json: model_type \"gpt_neox\" is not supported; expected one of llama, mistral, qwen2, qwen3, gpt2, "
      "mixtral, qwen3_moe, olmo2, smollm3, phi3, gemma3_text, deepseek_v2, deepseek_v3, gpt_oss, granite");
  EXPECT_THAT(config_error("hidden_act", "gelu"), HasSubstr("config.json: hidden_act \"gelu\" is not supported"));
  EXPECT_THAT(config_error("attention_bias", true), HasSubstr("\"attention_bias\": true is not supported"));
  EXPECT_THAT(config_error("mlp_bias", true), HasSubstr("\"mlp_bias\": true is not supported"));
  EXPECT_THAT(config_error("quantization_config", {{"bits", 4}}),
              HasSubstr("\"quantization_config\" is not supported"));
  nlohmann::json nf4 = {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}, {"bnb_4bit_quant_type", "nf4"}};
  EXPECT_EQ(config_error("quantization_config", nf4), "");
  nf4["bnb_4bit_quant_type"] = "fp4";
  EXPECT_THAT(config_error("quantization_config", nf4), HasSubstr("or one in NF4 of bitsandbytes"));
  EXPECT_THAT(config_error("num_local_experts", 8), HasSubstr("\"num_local_experts\" is not supported"));
  EXPECT_THAT(config_error("partial_rotary_factor", 0.5), HasSubstr("\"partial_rotary_factor\": 0.5"));
  EXPECT_THAT(config_error("rope_scaling", {{"rope_type", "proportional"}}),
              HasSubstr("rope_scaling of type \"proportional\" is not supported; expected default, linear, dynamic, "
                        "llama3, yarn or longrope"));
  EXPECT_THAT(config_error("rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.25}}),
              HasSubstr("\"partial_rotary_factor\": 0.25 in rope_parameters"));
  EXPECT_THAT(config_error("layer_types", {"linear_attention"}, "qwen3"), HasSubstr("type \"linear_attention\""));
}

std::string error_of(const char* type, nlohmann::json changes) {
  auto description = tiny_hf_config();
  description.update(changes);
  description["model_type"] = type;
  return config_error(description);
}

TEST(HfConfig, WhatDeepSeekCannotDoIsRefusedByName) {
  const auto error_with = [](const char* type, const nlohmann::json& changes) {
    nlohmann::json all = {{"kv_lora_rank", 8},
                          {"qk_nope_head_dim", 4},
                          {"qk_rope_head_dim", 4},
                          {"v_head_dim", 4},
                          {"n_routed_experts", 4},
                          {"num_experts_per_tok", 2},
                          {"n_shared_experts", 1},
                          {"moe_intermediate_size", 8},
                          {"n_group", 2},
                          {"topk_group", 1},
                          {"q_lora_rank", nullptr},
                          {"first_k_dense_replace", 0},
                          {"routed_scaling_factor", 1.0},
                          {"num_key_value_heads", tiny_hf_config()["num_attention_heads"]}};
    all.update(changes);
    return error_of(type, all);
  };
  for (const char* type : {"deepseek_v2", "deepseek_v3"}) {
    EXPECT_EQ(error_with(type, nlohmann::json::object()), "");
    EXPECT_THAT(error_with(type, {{"moe_layer_freq", 2}}), HasSubstr("\"moe_layer_freq\": 2 is not supported"));
    EXPECT_THAT(error_with(type, {{"qk_rope_head_dim", 3}}), HasSubstr("heads of 7 elements, of which 3 are rotated"));
    EXPECT_THAT(error_with(type, {{"qk_rope_head_dim", 3}, {"qk_nope_head_dim", 5}}),
                HasSubstr("heads of 8 elements, of which 3 are rotated"));
    EXPECT_THAT(error_with(type, {{"qk_nope_head_dim", 0}}), HasSubstr("heads of 4 elements, of which 4"));
    EXPECT_THAT(error_with(type, {{"norm_topk_prob", nullptr}}), HasSubstr("\"norm_topk_prob\": null"));
    EXPECT_THAT(error_with(type, {{"num_key_value_heads", 1}}), HasSubstr("as many key heads as query heads"));
    EXPECT_THAT(error_with(type, {{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}, {"mscale_all_dim", 1.0}}}}),
                HasSubstr("of type \"linear\" with \"mscale_all_dim\""));
    EXPECT_THAT(error_with(type, {{"v_head_dim", 9}}), HasSubstr("v_head_dim = 9: expected 1 to the size"));
    EXPECT_THAT(error_with(type, {{"kv_lora_rank", 0}}), HasSubstr("kv_lora_rank = 0"));
    EXPECT_THAT(error_with(type, {{"rope_interleave", false}}), HasSubstr("\"rope_interleave\": false"));
    EXPECT_THAT(error_with(type, {{"topk_method", "best"}}), HasSubstr("\"topk_method\": \"best\""));
    EXPECT_THAT(error_with(type, {{"quantization_config", {{"bits", 8}}}}), HasSubstr("\"quantization_config\""));
    EXPECT_THAT(error_with(type, {{"n_shared_experts", -1}}), HasSubstr("shared_experts = -1"));
  }
  const nlohmann::json blocks = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {128, 128}}};
  EXPECT_EQ(error_with("deepseek_v3", {{"quantization_config", blocks}}), "");
  EXPECT_THAT(error_with("deepseek_v2", {{"quantization_config", blocks}}), HasSubstr("expected a model without it"));
  EXPECT_THAT(error_with("deepseek_v2", {{"norm_topk_prob", true}}), HasSubstr("\"norm_topk_prob\": true"));
  EXPECT_THAT(error_with("deepseek_v2", {{"scoring_func", "sigmoid"}}), HasSubstr("expected \"softmax\""));
  EXPECT_THAT(error_with("deepseek_v3", {{"scoring_func", "softmax"}}), HasSubstr("expected \"sigmoid\""));
  EXPECT_THAT(error_with("deepseek_v3", {{"n_group", 1}, {"topk_group", 5}}),
              HasSubstr("\"n_group\" is 1 and \"topk_group\" 5"));
  EXPECT_THAT(error_with("deepseek_v3", {{"n_group", nullptr}}), HasSubstr("\"n_group\""));
  EXPECT_THAT(
      error_of("deepseek_v3", {{"kv_lora_rank", 8}, {"num_key_value_heads", tiny_hf_config()["num_attention_heads"]}}),
      HasSubstr("has no \"q_lora_rank\""));
  EXPECT_THAT(error_with("deepseek_v3", {{"n_group", 3}}), HasSubstr("expected groups of equal size"));
  EXPECT_THAT(error_with("deepseek_v3", {{"n_group", 4}, {"num_experts_per_tok", 1}}),
              HasSubstr("expected two or more in each"));
  EXPECT_THAT(error_with("deepseek_v3", {{"num_experts_per_tok", 3}}), HasSubstr("enough experts in those of a token"));
  EXPECT_THAT(error_with("deepseek_v3", {{"first_k_dense_replace", 1}, {"routed_scaling_factor", 0.0}}),
              HasSubstr("routed_scaling = 0"));
}

TEST(HfConfig, WhatGptOssCannotDoIsRefusedByName) {
  const auto error_with = [](const nlohmann::json& changes) {
    nlohmann::json all = {{"num_local_experts", 4},
                          {"num_experts_per_tok", 2},
                          {"num_hidden_layers", 4},
                          {"rope_scaling", {{"rope_type", "default"}}}};
    all.update(changes);
    return error_of("gpt_oss", all);
  };
  EXPECT_EQ(error_with({{"attention_bias", true}, {"experts_per_token", 2}}), "");
  EXPECT_EQ(error_with({{"quantization_config", {{"quant_method", "mxfp4"}}}}), "");
  EXPECT_THAT(error_with({{"quantization_config", {{"quant_method", "fp8"}}}}),
              HasSubstr("expected a model without it, or \"quant_method\": \"mxfp4\""));
  EXPECT_THAT(error_with({{"attention_bias", false}}), HasSubstr("\"attention_bias\": false is not supported"));
  EXPECT_THAT(error_with({{"experts_per_token", 3}}),
              HasSubstr("\"experts_per_token\" and \"num_experts_per_tok\" differ"));
  EXPECT_THAT(error_with({{"swiglu_alpha", 1.5}}), HasSubstr("\"swiglu_alpha\": 1.5 is not supported; expected 1.702"));
  EXPECT_THAT(error_with({{"swiglu_limit", -1.0}}), HasSubstr("activation_limit = -1: expected above 0"));
  EXPECT_THAT(error_with({{"sliding_window", nullptr}}), HasSubstr("\"sliding_window\": null"));
  EXPECT_THAT(error_with({{"sliding_window", 0}}), HasSubstr("\"sliding_window\": 0 is not supported"));
  const std::vector<std::string> all_full(4, "full_attention");
  EXPECT_EQ(error_with({{"sliding_window", nullptr}, {"layer_types", all_full}}), "");
  EXPECT_THAT(error_with({{"rope_scaling", nullptr}}), HasSubstr("has neither \"rope_scaling\" nor"));
  EXPECT_THAT(error_with({{"mlp_bias", true}}), HasSubstr("\"mlp_bias\": true is not supported"));
  EXPECT_THAT(error_of("mixtral", {{"num_local_experts", 4}, {"swiglu_limit", 7.0}}),
              HasSubstr("\"swiglu_limit\" is not supported"));
}

TEST(HfConfig, WhatLaterFamiliesCannotDoIsRefusedByName) {
  EXPECT_THAT(error_of("granite", {{"attention_multiplier", 0.0}}),
              HasSubstr("\"attention_multiplier\": 0 is not supported; expected a number above 0"));
  EXPECT_THAT(error_of("qwen3_moe", {{"num_experts", 4}, {"decoder_sparse_step", 2}}),
              HasSubstr("\"decoder_sparse_step\": 2 is not supported"));
  EXPECT_THAT(error_of("qwen3_moe", {{"num_experts", 4}, {"mlp_only_layers", {0}}}),
              HasSubstr("\"mlp_only_layers\" of some layers is not supported"));
  EXPECT_THAT(error_of("qwen3_moe", nlohmann::json::object()), HasSubstr("has no \"num_experts\""));
  EXPECT_THAT(error_of("olmo2", {{"num_experts", 4}}), HasSubstr("\"num_experts\" is not supported"));
  EXPECT_THAT(error_of("olmo2", {{"attention_bias", true}}), HasSubstr("\"attention_bias\": true is not supported"));
  EXPECT_THAT(error_of("llama", {{"no_rope_layers", {0}}}), HasSubstr("\"no_rope_layers\" is not supported"));
  EXPECT_THAT(error_of("smollm3", {{"num_hidden_layers", 2}, {"no_rope_layers", {0}}}),
              HasSubstr("\"no_rope_layers\" names 1 layers, but \"num_hidden_layers\" is 2"));
  EXPECT_THAT(error_of("smollm3", {{"no_rope_layer_interval", 0}}), HasSubstr("\"no_rope_layer_interval\" is 0"));
  EXPECT_THAT(error_of("phi3", {{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}}),
              HasSubstr("of type \"linear\" in a model of the family phi3 is not supported"));
  EXPECT_THAT(error_of("phi3", {{"partial_rotary_factor", 0.1}}), HasSubstr("\"partial_rotary_factor\": 0.1"));
  EXPECT_THAT(error_of("gemma3_text", {{"final_logit_softcapping", 30.0}}),
              HasSubstr("\"final_logit_softcapping\" is not supported"));
  EXPECT_THAT(error_of("gemma3_text", {{"attn_logit_softcapping", 50.0}}),
              HasSubstr("\"attn_logit_softcapping\" is not supported"));
  EXPECT_THAT(error_of("gemma3_text", {{"hidden_activation", "gelu"}}),
              HasSubstr("hidden_activation \"gelu\" is not supported; expected \"gelu_pytorch_tanh\""));
  const nlohmann::json plain = {{"rope_type", "default"}};
  EXPECT_THAT(
      error_of("gemma3_text",
               {{"num_hidden_layers", 6},
                {"rope_parameters",
                 {{"full_attention", plain}, {"sliding_attention", {{"rope_type", "linear"}, {"factor", 2.0}}}}}}),
      HasSubstr("rope_parameters: sliding_attention of type \"linear\" is not supported; expected default"));
  EXPECT_THAT(error_of("gemma3_text", {{"rope_parameters", {{"full_attention", plain}, {"rope_theta", 5.0}}}}),
              HasSubstr("\"rope_theta\" is beside those of kinds of layers"));
}

TEST(HfConfig, YarnAndLongropeAreAsTransformersHasThem) {
  auto description = tiny_hf_config();
  description["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 8}};
  const RopeScaling yarn = read_config(description).rope_scaling;
  EXPECT_DOUBLE_EQ(yarn.attention_factor, 0.1 * std::log(4.0) + 1.0);
  EXPECT_EQ(yarn.original_max_seq_len, 8);
  EXPECT_EQ(read_config(description).max_seq_len, 32);
  description["rope_scaling"].update({{"mscale", 0.5}, {"mscale_all_dim", 2.0}, {"beta_fast", 0.5}});
  EXPECT_THAT(config_error(description), HasSubstr("beta_fast = 0.5 and beta_slow = 1"));
  description["rope_scaling"]["beta_fast"] = nullptr;
  EXPECT_DOUBLE_EQ(read_config(description).rope_scaling.attention_factor,
                   (0.05 * std::log(4.0) + 1.0) / (0.2 * std::log(4.0) + 1.0));
  description["original_max_position_embeddings"] = 9;
  EXPECT_THAT(config_error(description), HasSubstr("\"original_max_position_embeddings\" is 9, but 8"));
  description["original_max_position_embeddings"] = 8;
  EXPECT_EQ(config_error(description), "");

  const std::vector<double> four = {1.0, 2.0, 3.0, 4.0};  // heads of 8
  auto phi = tiny_hf_config();
  phi.update({{"model_type", "phi3"}, {"max_position_embeddings", 131072}});
  phi["rope_scaling"] = {{"type", "su"}, {"short_factor", four}, {"long_factor", four}};
  const LlamaConfig longrope = read_config(phi);
  EXPECT_EQ(longrope.rope_scaling.type, RopeScalingType::longrope);
  EXPECT_EQ(longrope.rope_scaling.original_max_seq_len, 4096);
  EXPECT_DOUBLE_EQ(longrope.rope_scaling.attention_factor, std::sqrt(1.0 + std::log(32.0) / std::log(4096.0)));
  phi["rope_scaling"]["long_factor"] = {1.0, 2.0};
  EXPECT_THAT(config_error(phi), HasSubstr("long_factor of 2 numbers: expected one for each of the 4 pairs"));
  phi["rope_scaling"]["long_factor"] = {1.0, 2.0, 0.0, 1.0};
  EXPECT_THAT(config_error(phi), HasSubstr("long_factor of 0: expected numbers above 0"));
  phi["rope_scaling"].update({{"long_factor", four}, {"original_max_position_embeddings", 100}});
  EXPECT_THAT(config_error(phi), HasSubstr("where transformers takes 4096"));
}

TEST(HfConfig, SomeLayersMayHaveAWindow) {
  auto description = tiny_hf_config();
  description.update({{"model_type", "qwen2"},
                      {"num_hidden_layers", 4},
                      {"use_sliding_window", true},
                      {"sliding_window", 4},
                      {"max_window_layers", 3}});
  const LlamaConfig qwen = read_config(description);
  EXPECT_EQ(qwen.full_layers, (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(std::tuple(qwen.window_of(2), qwen.window_of(3)), std::tuple(0, 4));
  description.update({{"model_type", "gemma3_text"}, {"num_hidden_layers", 7}, {"head_dim", 8}});
  description.erase("hidden_act");
  const LlamaConfig gemma = read_config(description);
  EXPECT_EQ(gemma.full_layers, std::vector<std::int64_t>{5});
  EXPECT_EQ(std::tuple(gemma.rope_theta, gemma.window_rope_theta, gemma.query_scalar), std::tuple(20000.0, 1e4, 256.0));
  description.update({{"model_type", "smollm3"}, {"use_sliding_window", false}});
  EXPECT_EQ(read_config(description).unrotated_layers, std::vector<std::int64_t>{3});
}

// Settings of GPT-2 and Mixtral that change their results.
TEST(HfConfig, WhatOtherFamiliesCannotDoIsRefusedByName) {
  const nlohmann::json gpt2 = {{"model_type", "gpt2"}, {"n_embd", 12},     {"n_layer", 1},
                               {"n_head", 4},          {"n_positions", 8}, {"vocab_size", 11}};
  const auto gpt2_error = [&](const char* key, const nlohmann::json& value) {
    auto description = gpt2;
    description[key] = value;
    return config_error(description);
  };
  EXPECT_EQ(config_error(gpt2), "");
  EXPECT_EQ(gpt2_error("activation_function", "gelu_pytorch_tanh"), "");
  EXPECT_EQ(gpt2_error("activation_function", "relu"),
            "config.json: activation_function \"relu\" is not supported; expected \"gelu_new\"");
  EXPECT_EQ(gpt2_error("scale_attn_weights", false),
            "config.json: \"scale_attn_weights\": false is not supported; expected true");
  for (const char* flag : {"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"}) {
    EXPECT_EQ(gpt2_error(flag, true), fmt::format("config.json: \"{}\": true is not supported; expected false", flag));
  }
  EXPECT_THAT(gpt2_error("quantization_config", {{"bits", 8}}), HasSubstr("\"quantization_config\" is not supported"));
  EXPECT_THAT(gpt2_error("n_head", 5), AllOf(HasSubstr("dim = 12 and n_heads = 5"), HasSubstr("nearest")));
  auto without = gpt2;
  without.erase("n_positions");
  EXPECT_EQ(config_error(without), "config.json has no \"n_positions\"");

  auto mixtral = tiny_hf_config();
  mixtral.update({{"model_type", "mixtral"}, {"num_local_experts", 4}});
  const auto mixtral_error = [&](const char* key, const nlohmann::json& value) {
    auto description = mixtral;
    description[key] = value;
    return config_error(description);
  };
  EXPECT_EQ(config_error(mixtral), "");
  EXPECT_EQ(mixtral_error("num_experts_per_tok", 4), "");
  EXPECT_THAT(mixtral_error("num_experts_per_tok", 5),
              HasSubstr("experts = 4 and experts_per_token = 5: expected 1 to 4096"));
  EXPECT_THAT(mixtral_error("num_local_experts", 5000), HasSubstr("experts = 5000"));
  EXPECT_THAT(mixtral_error("num_experts_per_tok", 0), HasSubstr("experts_per_token = 0: expected 1 to 4096 experts"));
  EXPECT_EQ(mixtral_error("router_jitter_noise", 0.5),
            "config.json: \"router_jitter_noise\": 0.5 is not supported; expected 0");
  EXPECT_EQ(mixtral_error("output_router_logits", true),
            "config.json: \"output_router_logits\": true is not supported; expected false");
  mixtral.erase("num_local_experts");
  EXPECT_EQ(config_error(mixtral), "config.json has no \"num_local_experts\"");
}

TEST(HfConfig, MalformedDescriptionsNameFileAndKey) {
  EXPECT_THAT(config_error("vocab_size", "many"), HasSubstr("config.json: \"vocab_size\" is \"many\""));
  EXPECT_THAT(config_error("hidden_size", 256.7), HasSubstr("\"hidden_size\" is 256.7"));
  EXPECT_THAT(config_error("hidden_size", std::uint64_t{1} << 63), HasSubstr("\"hidden_size\" is 9223372036854775808"));
  EXPECT_THAT(config_error("num_attention_heads", 0), AllOf(HasSubstr("config.json: "), HasSubstr("n_heads")));
  EXPECT_THAT(config_error("head_dim", 7), AllOf(HasSubstr("config.json: "), HasSubstr("head_dim = 7")));
  EXPECT_THAT(config_error("rope_scaling", 3), HasSubstr("\"rope_scaling\" is not an object"));
  EXPECT_THAT(config_error("rope_scaling", {{"type", "linear"}}), HasSubstr("rope_scaling has no \"factor\""));
  EXPECT_THAT(config_error("rope_scaling", {{"type", "linear"}, {"factor", 0.5}}), HasSubstr("expected 1 or above"));
  EXPECT_THAT(config_error("rope_scaling", {{"type", "dynamic"}, {"factor", 1e300}}),
              HasSubstr("\"factor\" is 1e+300"));
  EXPECT_THAT(config_error("rope_scaling", {{"rope_type", "llama3"},
                                            {"factor", 8},
                                            {"low_freq_factor", 4},
                                            {"high_freq_factor", 4},
                                            {"original_max_position_embeddings", 8}}),
              HasSubstr("expected 0 < low < high"));
  EXPECT_THAT(config_error("layer_types", {"full_attention", "full_attention"}, "qwen2"),
              HasSubstr("\"layer_types\" names 2 layers, but \"num_hidden_layers\" is 1"));
  EXPECT_THAT(config_error("sliding_window", -1, "mistral"), HasSubstr("sliding_window = -1"));
  auto no_groups = tiny_hf_config();
  no_groups["model_type"] = "mistral";
  no_groups.erase("num_key_value_heads");
  EXPECT_THAT(config_error(no_groups), HasSubstr("has no \"num_key_value_heads\""));
  EXPECT_THROW(llama_config_from_hf("[", "config.json"), CheckpointError);
}

// Numbers that would overflow, loop for years or take all memory; brackets that would overflow the stack.
TEST(HfConfig, HostileDescriptionsAreRefusedAtOnce) {
  EXPECT_THAT(config_error("num_hidden_layers", std::int64_t{1} << 40),
              HasSubstr("n_layers = 1099511627776: expected at most 10000"));
  EXPECT_THAT(config_error("head_dim", std::int64_t{1} << 40), HasSubstr("head_dim = 1099511627776"));
  auto large = tiny_hf_config();
  large.update({{"hidden_size", 1 << 30}, {"num_attention_heads", 1 << 10}, {"num_hidden_layers", 1 << 13}});
  EXPECT_THAT(config_error(large), AllOf(HasSubstr("config.json: "), HasSubstr("parameters: expected at most 1e+15")));
  large = tiny_hf_config();
  large.update({{"hidden_size", 2147483647}, {"num_attention_heads", 1 << 30}});
  EXPECT_THAT(config_error(large), HasSubstr("n_heads = 1073741824; nearest: n_heads = 1"));
  for (const std::string key : {"model_type", "rope_scaling", "other"}) {
    const std::string deep = "{\"" + key + "\": " + std::string(200'000, '[') + std::string(200'000, ']') + "}";
    EXPECT_THAT(error_text<CheckpointError>([&] { llama_config_from_hf(deep, "config.json"); }),
                HasSubstr("config.json: its JSON nests deeper than 100 levels"))
        << key;
  }
}

// Settings that older and newer files express differently.
TEST(HfConfig, RotarySettingsMayStandInEitherPlace) {
  auto older = tiny_hf_config(), newer = tiny_hf_config();
  older["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
  newer.erase("rope_theta");
  newer["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 20000.0}};
  const auto config = read_config(older);
  EXPECT_EQ(config, read_config(newer));
  EXPECT_EQ(config.rope_scaling, (RopeScaling{.type = RopeScalingType::linear, .factor = 2.0}));
  EXPECT_EQ(config.max_seq_len, 12);
  older["rope_scaling"]["type"] = "dynamic";
  EXPECT_EQ(read_config(older).max_seq_len, 24);
}

TEST(HfConfig, TwoKeysThatSayTheSameThingMustAgree) {
  auto description = tiny_hf_config();
  const nlohmann::json linear = {{"rope_type", "linear"}, {"factor", 2.0}};
  description["rope_scaling"] = linear;
  description["rope_parameters"] = linear;
  EXPECT_EQ(config_error(description), "");
  description["rope_parameters"]["factor"] = 3.0;
  EXPECT_THAT(config_error(description), HasSubstr("\"rope_scaling\" and \"rope_parameters\" say different things"));
  description.erase("rope_scaling");
  description["rope_parameters"]["rope_theta"] = 5e5;
  EXPECT_THAT(config_error(description), HasSubstr("\"rope_theta\" is 20000, but 500000 in rope_parameters"));
  description["rope_parameters"] = {{"type", "linear"}, {"rope_type", "default"}, {"factor", 2.0}};
  EXPECT_THAT(config_error(description), HasSubstr("\"type\" is \"linear\", but \"rope_type\" is \"default\""));
  // A different rotation for each kind of layer.
  description["rope_parameters"] = {{"full_attention", linear}, {"sliding_attention", {{"rope_type", "default"}}}};
  EXPECT_THAT(config_error(description), HasSubstr("rope_parameters of its own for \"full_attention\" layers"));
}

TEST(HfConfig, AFamilysDefaultsAreTransformers) {
  auto description = tiny_hf_config();
  description["model_type"] = "mistral";
  EXPECT_EQ(read_config(description).sliding_window, 4096);
  description["sliding_window"] = nullptr;
  EXPECT_EQ(read_config(description).sliding_window, 0);
  description["model_type"] = "qwen3";
  EXPECT_EQ(read_config(description).head_dim(), 128);
  description["model_type"] = "qwen2";
  EXPECT_EQ(read_config(description).head_dim(), 8);
  description.erase("rope_theta");
  description.erase("rms_norm_eps");
  description.update({{"model_type", "mixtral"}, {"num_local_experts", 3}});
  const auto mixtral = read_config(description);
  EXPECT_EQ(std::tuple(mixtral.rope_theta, mixtral.norm_eps, mixtral.experts, mixtral.experts_per_token),
            std::tuple(1e6, 1e-5, 3, 2));
  const auto gpt2 = llama_config_from_hf(
      R"({"model_type": "gpt2", "n_embd": 12, "n_layer": 1, "n_head": 4, "n_positions": 8, "vocab_size": 11})", "");
  EXPECT_EQ(std::tuple(gpt2.ffn_hidden, gpt2.norm_eps, gpt2.tie_embeddings), std::tuple(48, 1e-5, true));
}

TEST(HfConfig, ACheckpointKnowsItsFamily) {
  LlamaConfig config = read_config(tiny_hf_config());
  config.family = LlamaFamily::qwen3;
  config.own_head_dim = 6;
  config.sliding_window = 4;
  config.rope_scaling = {.type = RopeScalingType::llama3,
                         .factor = 8.0,
                         .low_freq_factor = 2.0,
                         .high_freq_factor = 3.0,
                         .original_max_seq_len = 10};
  auto metadata = llama_metadata(config);
  EXPECT_EQ(llama_from_metadata(metadata, "here"), config);
  metadata["name"] = "gpt";
  EXPECT_THROW(llama_from_metadata(metadata, "here"), CheckpointError);
}

}  // namespace
}  // namespace phalanx::models
