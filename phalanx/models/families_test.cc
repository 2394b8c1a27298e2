// What GPT-2 and Mixtral do not share with Llama: published sizes, the last learnt positions, initial values.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/remainder.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/config/hf_unsupported.h"
#include "phalanx/models/config/llama_json.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/testing/small_families.h"
#include "phalanx/nn/init.h"

namespace phalanx::models {
namespace {

LlamaConfig small_gpt2() {
  return {.family = LlamaFamily::gpt2,
          .dim = 24,
          .n_layers = 2,
          .n_heads = 8,
          .n_kv_heads = 8,
          .ffn_hidden = 40,
          .vocab_size = 61,
          .max_seq_len = 12,
          .tie_embeddings = true};
}

LlamaConfig small_mixtral() {
  return {.family = LlamaFamily::mixtral,
          .dim = 32,
          .n_layers = 2,
          .ffn_hidden = 40,
          .vocab_size = 61,
          .max_seq_len = 12,
          .experts = 6,
          .experts_per_token = 2};
}

TEST(ModelSizes, AreThosePublished) {
  const LlamaConfig gpt2{.family = LlamaFamily::gpt2,
                         .dim = 768,
                         .n_layers = 12,
                         .n_heads = 12,
                         .n_kv_heads = 12,
                         .ffn_hidden = 3072,
                         .vocab_size = 50257,
                         .max_seq_len = 1024,
                         .tie_embeddings = true};
  EXPECT_EQ(gpt2.parameter_count(), 124'439'808);
  EXPECT_EQ(gpt2.active_parameter_count(), 124'439'808);
  EXPECT_EQ(gpt2.flops_per_token(1024), 6.0 * (124'439'808 - 1024 * 768) + 12.0 * 12 * 768 * 1024);
  const LlamaConfig mixtral{.family = LlamaFamily::mixtral,
                            .dim = 4096,
                            .n_layers = 32,
                            .n_heads = 32,
                            .n_kv_heads = 8,
                            .ffn_hidden = 14336,
                            .vocab_size = 32000,
                            .max_seq_len = 32768,
                            .experts = 8,
                            .experts_per_token = 2};
  EXPECT_EQ(mixtral.parameter_count(), 46'702'792'704);
  EXPECT_EQ(mixtral.active_parameter_count(), 12'879'925'248);
  EXPECT_EQ(mixtral.flops_per_token(4096), 6.0 * (12'879'925'248 - 32000 * 4096) + 12.0 * 32 * 4096 * 4096);
}

TEST(ModelSizes, OfFlavorsAreThosePublished) {
  using enum LlamaFamily;
  const std::vector<std::tuple<LlamaFamily, const char*, std::int64_t>> published = {
      {mistral, "mistral_7b", 7'241'732'096},
      {qwen2, "qwen2_0.5b", 494'032'768},
      {qwen2, "qwen2_1.5b", 1'543'714'304},
      {qwen2, "qwen2_7b", 7'615'616'512},
      {qwen3, "qwen3_0.6b", 596'049'920},
      {qwen3, "qwen3_1.7b", 1'720'574'976},
      {qwen3, "qwen3_4b", 4'022'468'096},
      {qwen3, "qwen3_8b", 8'190'735'360},
      {qwen3, "qwen3_14b", 14'768'307'200},
      {qwen3, "qwen3_32b", 32'762'123'264},
      {gpt2, "gpt2_124m", 124'439'808},
      {gpt2, "gpt2_355m", 354'823'168},
      {gpt2, "gpt2_774m", 774'030'080},
      {gpt2, "gpt2_1.5b", 1'557'611'200},
      {mixtral, "mixtral_8x7b", 46'702'792'704},
      {qwen3_moe, "qwen3_30b_a3b", 30'532'122'624},
      {qwen3_moe, "qwen3_235b_a22b", 235'093'634'560},
      {olmo2, "olmo2_1b", 1'484'916'736},
      {olmo2, "olmo2_7b", 7'298'617'344},
      {olmo2, "olmo2_13b", 13'716'198'400},
      {olmo2, "olmo2_32b", 32'234'279'936},
      {smollm3, "smollm3_3b", 3'075'098'624},
      {phi3, "phi3_mini", 3'821'079'552},
      {phi3, "phi4", 14'659'507'200},
      {gemma3_text, "gemma3_270m", 268'098'176},
      {gemma3_text, "gemma3_1b", 999'885'952},
      {deepseek_v2, "deepseek_v2_lite", 15'706'484'224},
      {deepseek_v2, "deepseek_v2_236b", 235'741'434'880},
      // Without biases of experts, 256 in each of 58 layers, which are no parameters: with them 671'026'419'200.
      {deepseek_v3, "deepseek_v3_671b", 671'026'404'352},
      {deepseek_v3, "moonlight_16b_a3b", 15'960'108'544},
      {gpt_oss, "gpt_oss_20b", 20'914'757'184},
      {gpt_oss, "gpt_oss_120b", 116'829'156'672},
      {granite, "granite3_2b", 2'533'531'648},
      {granite, "granite3_8b", 8'170'848'256}};
  for (const auto& [family, flavor, count] : published) {
    EXPECT_EQ(llama_flavor(flavor, family).parameter_count(), count) << family_name(family) << " " << flavor;
  }
  // The model card's 3.61 and 5.13 billion active ones are without the embedding, but with the output layer.
  for (const auto& [flavor, active] : {std::pair("gpt_oss_20b", 3.61e9), {"gpt_oss_120b", 5.13e9}}) {
    const LlamaConfig config = llama_flavor(flavor, gpt_oss);
    EXPECT_NEAR(static_cast<double>(config.active_parameter_count() - config.vocab_size * config.dim), active, 5e6);
  }
  for (const auto family : all_families()) {
    for (const auto& flavor : llama_flavor_names(family)) llama_flavor(flavor, family).validate();
    EXPECT_LT(llama_flavor("debug", family).parameter_count(), 1'000'000);
  }
  EXPECT_THAT(error_text<ConfigError>([] { llama_flavor("olmo2_5b", olmo2); }),
              HasSubstr("unknown flavor 'olmo2_5b' of the model olmo2"));
  EXPECT_THAT(
      error_text<ConfigError>([] { llama_flavor("qwen3_4b", olmo2); }),
      HasSubstr("the flavor 'qwen3_4b' is of the model qwen3, not of olmo2: expected [model] name = \"qwen3\""));
}

TEST(ModelSizes, AreThoseOfTheTensorsOfEachFamily) {
  auto untied = small_gpt2();
  untied.tie_embeddings = false;
  std::vector<LlamaConfig> configs = small_families(/*n_layers=*/2, /*max_seq_len=*/16);
  configs.insert(configs.end(), {small_gpt2(), untied, small_mixtral()});
  for (const auto& config : configs) {
    const Llama model(config, {.without_memory = true});
    const auto shapes = llama_parameter_shapes(config);
    std::int64_t elements = 0;
    for (const auto& p : model.named_parameters()) {
      elements += p.value().numel();
      ASSERT_TRUE(shapes.contains(p.key())) << p.key();
      EXPECT_EQ(shapes.at(p.key()), p.value().sizes().vec()) << p.key();
    }
    EXPECT_EQ(model.named_parameters().size(), shapes.size());
    EXPECT_EQ(elements, config.parameter_count());
    EXPECT_EQ(llama_from_metadata(llama_metadata(config), ""), config);
  }
}

TEST(LlamaMetadata, AKeyOfALaterVersionIsRefused) {
  auto metadata = llama_metadata(small_mixtral());
  metadata["flavor"] = "hf";
  EXPECT_EQ(llama_from_metadata(metadata, "here"), small_mixtral());
  metadata["softcap"] = 30.0;
  EXPECT_THAT(error_text<CheckpointError>([&] { llama_from_metadata(metadata, "here"); }),
              HasSubstr("here says \"softcap\", which this program does not know"));
}

TEST(Gpt2, StartsAsOpenAIsDoes) {
  Llama model(small_gpt2());
  nn::initialise(model, 3);
  const auto all = model.named_parameters();
  EXPECT_NEAR(all["pos_embeddings.weight"].std().item<double>(), 0.02, 0.002);
  EXPECT_NEAR(all["layers.0.feed_forward.w2.weight"].std().item<double>(), 0.02 / std::sqrt(4.0), 0.001);
  EXPECT_EQ(all["layers.1.attention.wo.bias"].abs().max().item<double>(), 0.0);
  EXPECT_EQ(all["norm.bias"].abs().max().item<double>(), 0.0);
  EXPECT_EQ(all["norm.weight"].min().item<double>(), 1.0);
  Llama mixtral(small_mixtral());
  nn::initialise(mixtral, 3);
  const auto experts = mixtral.named_parameters();
  EXPECT_NEAR(experts["layers.0.moe.experts.5.w2.weight"].std().item<double>(), 0.02 / std::sqrt(4.0), 0.001);
  EXPECT_NEAR(experts["layers.0.moe.experts.5.w1.weight"].std().item<double>(), 0.02, 0.001);
}

// Rows of different lengths, up to the last position, with padding behind it; and no further.
TEST(Gpt2, ACacheGoesToTheLastPositionAndNoFurther) {
  Llama model(small_gpt2());
  nn::initialise(model, 3);
  const at::NoGradGuard no_grad;
  for (const auto& p : model.parameters()) p.mul_(4.0);
  const at::Tensor tokens = at::remainder(at::arange(24, at::kLong).mul(7), 61).view({2, 12});
  auto cache = model.make_cache(2, 16);
  model.forward(tokens.narrow(1, 0, 9), cache, {9, 4});
  const at::Tensor next = at::cat({tokens[0].narrow(0, 9, 3), tokens[1].narrow(0, 4, 3)}).view({2, 3});
  const at::Tensor logits = model.forward(next, cache, {3, 2});
  EXPECT_TRUE(at::allclose(logits[0], model.forward(tokens.narrow(0, 0, 1))[0][11], 1e-4, 1e-4));
  EXPECT_TRUE(at::allclose(logits[1], model.forward(tokens.narrow(0, 1, 1).narrow(1, 0, 6))[0][5], 1e-4, 1e-4));
  // Four tokens behind six: the padding of the first row has no position.
  cache.truncate(0, 11);
  EXPECT_TRUE(model.forward(tokens.narrow(1, 8, 4), cache, {1, 4}).isfinite().all().item<bool>());
  EXPECT_THAT(error_text([&] { model.forward(next.narrow(1, 0, 1), cache); }),
              HasSubstr("a row of 13 tokens, but the model has learnt positions of 12"));
}

// Each row has the angles of its own length, and keys of short sequences are of no use to long ones.
TEST(Longrope, RowsOfACacheAreOnBothSidesOfTheLengthAtWhichAnglesChange) {
  LlamaConfig config{.family = LlamaFamily::phi3,
                     .dim = 32,
                     .n_layers = 2,
                     .ffn_hidden = 40,
                     .vocab_size = 61,
                     .max_seq_len = 12,
                     .rope_scaling = {.type = RopeScalingType::longrope,
                                      .original_max_seq_len = 6,
                                      .attention_factor = 1.2,
                                      .short_factor = {1, 1, 2, 3},
                                      .long_factor = {2, 3, 4, 5}}};
  Llama model(config);
  nn::initialise(model, 3);
  const at::NoGradGuard no_grad;
  for (const auto& p : model.parameters()) p.mul_(4.0);
  const at::Tensor tokens = at::remainder(at::arange(24, at::kLong).mul(7), 61).view({2, 12});
  auto cache = model.make_cache(2, 12);
  const auto alone = [&](std::int64_t row, std::int64_t count) {
    return model.forward(tokens.narrow(0, row, 1).narrow(1, 0, count))[0][count - 1];
  };
  at::Tensor logits = model.forward(tokens.narrow(1, 0, 9), cache, {9, 4});
  EXPECT_TRUE(at::allclose(logits[0], alone(0, 9), 1e-4, 1e-4));
  EXPECT_TRUE(at::allclose(logits[1], alone(1, 4), 1e-4, 1e-4));
  const at::Tensor next = at::cat({tokens[0].narrow(0, 9, 2), tokens[1].narrow(0, 4, 2)}).view({2, 2});
  logits = model.forward(next, cache);
  EXPECT_TRUE(at::allclose(logits[0], alone(0, 11), 1e-4, 1e-4));
  EXPECT_TRUE(at::allclose(logits[1], alone(1, 6), 1e-4, 1e-4));
  EXPECT_FALSE(at::allclose(alone(1, 7), model.forward(tokens.narrow(0, 1, 1))[0][6], 1e-4, 1e-4) &&
               at::allclose(alone(1, 6), model.forward(tokens.narrow(0, 1, 1))[0][5], 1e-4, 1e-4));
  EXPECT_THAT(error_text([&] { model.forward(next.narrow(1, 0, 1), cache); }),
              HasSubstr("row 1 grows from 6 to 7 tokens, and longrope has other angles beyond 6"));
  cache.truncate(1, 0);
  logits = model.forward(tokens.narrow(0, 1, 1).narrow(1, 0, 7), cache, {}, 1);
  EXPECT_TRUE(at::allclose(logits[0], alone(1, 7), 1e-4, 1e-4));
}

TEST(Gpt2, PositionsAreAUnitAndOfTheFirstPart) {
  auto config = small_gpt2();
  Llama tied(config, {.without_memory = true});
  EXPECT_EQ(tied.shard_units()[0], (std::vector<nn::Module*>{tied.pos_embeddings.get()}));
  config.tie_embeddings = false;
  Llama untied(config, {.without_memory = true});
  EXPECT_EQ(untied.shard_units()[0], (std::vector<nn::Module*>{untied.tok_embeddings.get()}));
  EXPECT_EQ(untied.shard_units()[1], (std::vector<nn::Module*>{untied.pos_embeddings.get()}));
  EXPECT_EQ(untied.shard_units().size(), 5U);
  const auto parts = divide_llama(small_gpt2(), {1, 1});
  EXPECT_NE(Llama(small_gpt2(), parts[0]).pos_embeddings, nullptr);
  const Llama last(small_gpt2(), parts[1]);
  EXPECT_EQ(last.pos_embeddings, nullptr);
  EXPECT_NE(last.tok_embeddings, nullptr);
}

TEST(Gpt2, PlacesInFilesAreTurnedPartsOfWhatIsThere) {
  const FileTensorView keys = hf_tensor_view(small_gpt2(), "layers.11.attention.wk.weight");
  EXPECT_EQ(keys, FileTensorView("transformer.h.11.attn.c_attn.weight", {.transposed = true, .part = 1, .parts = 3}));
  EXPECT_EQ(hf_tensor_view(small_gpt2(), "layers.0.attention.wv.bias"),
            FileTensorView("transformer.h.0.attn.c_attn.bias", {.part = 2, .parts = 3}));
  EXPECT_EQ(hf_tensor_view(small_gpt2(), "tok_embeddings.weight"), FileTensorView("transformer.wte.weight"));
  EXPECT_THROW(hf_tensor_view(small_gpt2(), "layers.0.feed_forward.w3.weight"), Error);
  EXPECT_EQ(hf_tensor_view(small_mixtral(), "layers.3.moe.experts.7.w2.weight"),
            FileTensorView("model.layers.3.block_sparse_moe.experts.7.w2.weight"));
  EXPECT_EQ(llama_fqn_from_hf("model.layers.3.block_sparse_moe.experts.7.w2.weight"),
            "layers.3.moe.experts.7.w2.weight");
  EXPECT_THROW(llama_hf_name("layers.3.moe.experts.x.w2.weight"), Error);
  const LlamaConfig gpt_oss{.family = LlamaFamily::gpt_oss, .experts = 8};
  EXPECT_EQ(hf_tensor_view(gpt_oss, "layers.3.moe.experts.7.w3.weight"),
            FileTensorView("model.layers.3.mlp.experts.gate_up_proj",
                           {.transposed = true, .part = 1, .parts = 2, .alternate = true, .slice = 7, .slices = 8}));
  EXPECT_EQ(hf_tensor_view(gpt_oss, "layers.3.moe.experts.7.w2.bias"),
            FileTensorView("model.layers.3.mlp.experts.down_proj_bias", {.slice = 7, .slices = 8}));
  EXPECT_EQ(hf_tensor_view(gpt_oss, "layers.3.attention.sinks").name, "model.layers.3.self_attn.sinks");
  EXPECT_THROW(hf_tensor_view(gpt_oss, "layers.3.moe.experts.7.w4.weight"), Error);
  EXPECT_TRUE(hf_may_ignore(small_gpt2(), "transformer.h.0.attn.bias"));
  EXPECT_FALSE(hf_may_ignore(small_gpt2(), "transformer.h.0.attn.c_attn.bias"));
}

std::string refusal(const LlamaConfig& config) {
  return error_text<ConfigError>([&] { config.validate(); });
}

TEST(ModelSizes, WhatAFamilyDoesNotHaveIsRefused) {
  EXPECT_EQ(refusal(small_gpt2()), "");  // heads of 3 elements: no rotary embedding
  auto config = small_gpt2();
  config.n_kv_heads = 4;
  EXPECT_THAT(refusal(config), HasSubstr("found n_heads = 8, n_kv_heads = 4, head_dim = 3"));
  config = small_gpt2();
  config.sliding_window = 4;
  EXPECT_THAT(refusal(config), HasSubstr("sliding_window = 4: expected 0 in a model of the family gpt2"));
  config = small_gpt2();
  config.experts = 2;
  EXPECT_THAT(refusal(config),
              HasSubstr("experts = 2 and experts_per_token = 0: expected 0 in a model of the family gpt2"));
  config = small_mixtral();
  config.experts_per_token = 7;
  EXPECT_THAT(refusal(config), HasSubstr("experts = 6 and experts_per_token = 7"));
  config = small_mixtral();
  config.activation_limit = 7.0;
  EXPECT_THAT(refusal(config), HasSubstr("activation_limit: not in a model of the family mixtral"));
  config.family = LlamaFamily::gpt_oss;
  EXPECT_EQ(refusal(config), "");
  config.activation_limit = 0.0;
  EXPECT_THAT(refusal(config), HasSubstr("activation_limit = 0: expected above 0"));
  LlamaConfig llama;
  llama.logits_scaling = 8.0;
  EXPECT_THAT(refusal(llama), HasSubstr("multipliers: not in a model of the family llama"));
  llama.family = LlamaFamily::granite;
  EXPECT_EQ(refusal(llama), "");
  llama.residual_multiplier = 0.0;
  EXPECT_THAT(refusal(llama), HasSubstr("residual_multiplier = 0, attention_multiplier = 0 and logits_scaling = 8"));
}

TEST(ModelCosts, AreThoseOfAFamilysMatrices) {
  const std::int64_t seq = 8;
  const auto gpt2 = llama_costs(small_gpt2(), seq), mixtral = llama_costs(small_mixtral(), seq);
  EXPECT_EQ(gpt2[1], 2.0 * 24 * 40);
  EXPECT_EQ(mixtral[1], 2 * 3.0 * 32 * 40 + 6 * 32);
}

TEST(HfConfig, WhatContradictsItselfOrTheModelsOrderIsRefused) {
  const auto error = [](const nlohmann::json& changes) {
    nlohmann::json config = {{"model_type", "qwen2"},         {"hidden_size", 32},        {"num_hidden_layers", 2},
                             {"num_attention_heads", 4},      {"num_key_value_heads", 2}, {"intermediate_size", 48},
                             {"max_position_embeddings", 64}, {"vocab_size", 64},         {"sliding_window", 8}};
    config.update(changes);
    try {
      llama_config_from_hf(config.dump(), "config.json");
      return std::string();
    } catch (const CheckpointError& failure) {
      return std::string(failure.what());
    }
  };
  EXPECT_EQ(error(nlohmann::json::object()), "");
  EXPECT_EQ(error({{"is_causal", true}, {"rope_scaling", {{"factor", 1.0}}}}), "");
  EXPECT_THAT(error({{"is_causal", false}}), HasSubstr("\"is_causal\": false is not supported; expected true"));
  EXPECT_THAT(error({{"use_bidirectional_attention", true}}), HasSubstr("\"use_bidirectional_attention\": true"));
  const nlohmann::json mixed = {"full_attention", "sliding_attention"};
  EXPECT_THAT(error({{"layer_types", mixed}}),
              HasSubstr("\"layer_types\" gives 1 of 2 layers a sliding window, but \"use_sliding_window\" is false"));
  EXPECT_THAT(error({{"rope_scaling", {{"factor", 4.0}}}}),
              HasSubstr("rope_scaling: \"factor\" is 4, but \"rope_type\" is not there"));
}

TEST(HfUnsupported, IsOneLineOfWhatHasAnEffectElsewhere) {
  const auto line = [](const char* text) { return hf_unsupported(text, "config.json"); };
  EXPECT_EQ(line(R"({"model_type": "llama", "hidden_size": 8, "attention_dropout": 0.0, "use_cache": true,
                     "initializer_range": 0.02, "rope_scaling": {"type": "linear"}, "eos_token_id": 2,
                     "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "unknown": null})"),
            "");
  EXPECT_EQ(line(R"({"model_type": "qwen2", "attention_dropout": 0.1, "initializer_range": 0.5, "sliding_window": 4,
                     "my_key": {"a": 1}, "other_dropout": 0.2, "logit_scale": 2})"),
            "config.json: not honoured: attention_dropout 0.1, other_dropout 0.2 (there is no dropout), "
            "initializer_range 0.5 (initial weights are drawn with 0.02); not read: logit_scale 2, my_key {\"a\":1}");
  EXPECT_EQ(line(R"({"model_type": "llama", "sliding_window": 16})"), "config.json: not read: sliding_window 16");
  EXPECT_EQ(line(R"({"model_type": "mistral", "sliding_window": 16, "use_sliding_window": true, "max_window_layers": 2,
                     "layer_types": ["full_attention"], "num_experts_per_tok": 2})"),
            "config.json: not read: layer_types [\"full_attention\"], max_window_layers 2, num_experts_per_tok 2, "
            "use_sliding_window true");
  EXPECT_EQ(line(R"({"model_type": "mixtral", "sliding_window": 16, "num_experts_per_tok": 2})"), "");
  EXPECT_EQ(line(R"({"model_type": "qwen3", "sliding_window": 4, "use_sliding_window": true, "max_window_layers": 2,
                     "layer_types": ["full_attention"]})"),
            "");
  // Only the rotary settings of the given type count.
  EXPECT_EQ(line(R"({"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0,
                     "attention_factor": 3.0, "original_max_position_embeddings": 64}})"),
            "config.json: not read: rope_scaling.attention_factor 3.0, "
            "rope_scaling.original_max_position_embeddings 64");
  EXPECT_EQ(line(R"({"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                     "factor": 2.0}})"),
            "config.json: not read: rope_parameters.factor 2.0");
  EXPECT_EQ(line(R"({"model_type": "llama", "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 64}})"),
            "");
  EXPECT_EQ(line(R"({"model_type": "qwen2", "architectures": ["LlamaForCausalLM"]})"),
            "config.json: not read: architectures [\"LlamaForCausalLM\"] (read as Qwen2ForCausalLM)");
  // GPT-2 has dropout unless the file says otherwise.
  EXPECT_EQ(line(R"({"model_type": "gpt2", "n_embd": 8, "embd_pdrop": 0.0, "resid_pdrop": 0, "summary_type": "x"})"),
            "config.json: not honoured: attn_pdrop 0.1 (there is no dropout)");
  EXPECT_THROW(line("["), CheckpointError);
}

}  // namespace
}  // namespace phalanx::models
