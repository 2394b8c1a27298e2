#include "phalanx/models/config/model_identity.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/models/config/hf_config.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::models {
namespace {

std::vector<std::string> keys_of(const LlamaConfig& saved, const LlamaConfig& found) {
  std::vector<std::string> keys;
  for (const auto& difference : model_differences(saved, found)) keys.push_back(difference.key);
  return keys;
}

LlamaConfig changed(LlamaConfig config, const std::function<void(LlamaConfig&)>& change) {
  change(config);
  return config;
}

TEST(ModelIdentity, EveryNumberThatChangesResultsIsADifference) {
  const LlamaConfig plain = llama_flavor("debug");
  using C = LlamaConfig;
  const std::vector<std::pair<std::function<void(C&)>, std::vector<std::string>>> cases = {
      {[](C& c) { c.dim = 128; }, {"dim", "head_dim"}},
      {[](C& c) { c.n_layers = 3; }, {"n_layers"}},
      {[](C& c) { c.n_heads = 8; }, {"head_dim", "n_heads"}},
      {[](C& c) { c.n_kv_heads = 1; }, {"n_kv_heads"}},
      {[](C& c) { c.own_head_dim = 8; }, {"head_dim"}},
      {[](C& c) { c.ffn_hidden = 8; }, {"ffn_hidden"}},
      {[](C& c) { c.vocab_size = 8; }, {"vocab_size"}},
      {[](C& c) { c.rope_theta = 500000; }, {"rope.theta"}},
      {[](C& c) { c.rope_scaling = {.type = RopeScalingType::linear, .factor = 2}; }, {"rope.factor", "rope.scaling"}},
      {[](C& c) { c.norm_eps = 1e-6; }, {"norm_eps"}},
      {[](C& c) { c.tie_embeddings = true; }, {"tie_embeddings"}},
      {[](C& c) { c.sliding_window = 16; }, {"sliding_window"}},
      {[](C& c) { c.family = LlamaFamily::qwen2; }, {"family", "qkv_bias"}},
      {[](C& c) { c.family = LlamaFamily::qwen3; }, {"family", "qk_norm"}},
      {[](C& c) { c.family = LlamaFamily::olmo2; }, {"family", "norms", "qk_norm", "qk_norm_over"}},
      {[](C& c) { c.family = LlamaFamily::gemma3_text; }, {"activation", "family", "norm", "norms", "qk_norm"}},
      {[](C& c) { c.family = LlamaFamily::gpt_oss, c.activation_limit = 7; },
       {"activation", "activation_limit", "expert_biases", "family", "output_bias", "qkv_bias", "sinks"}},
      {[](C& c) { c.family = LlamaFamily::granite; },
       {"attention_multiplier", "embedding_multiplier", "family", "logits_scaling", "residual_multiplier"}},
      {[](C& c) { c.unrotated_layers = {1}; }, {"unrotated_layers"}},
      {[](C& c) { c.full_layers = {1}; }, {"full_layers"}},
      {[](C& c) { c.window_rope_theta = 7; }, {"rope.window_theta"}},
      {[](C& c) { c.rotary_dim = 8; }, {"rope.rotary_dim"}},
      {[](C& c) { c.query_scalar = 8; }, {"query_scalar"}},
      {[](C& c) { c.normalise_routing = false; }, {"normalise_routing"}},
  };
  for (const auto& [change, keys] : cases) EXPECT_EQ(keys_of(plain, changed(plain, change)), keys);
  const LlamaConfig stretched = changed(plain, [](C& c) {
    c.rope_scaling = {.type = RopeScalingType::llama3,
                      .factor = 8,
                      .low_freq_factor = 1,
                      .high_freq_factor = 4,
                      .original_max_seq_len = 64};
    c.family = LlamaFamily::mixtral;
    c.experts = 4;
    c.experts_per_token = 2;
  });
  const std::vector<std::pair<std::function<void(C&)>, std::string>> more = {
      {[](C& c) { c.rope_scaling.factor = 4; }, "rope.factor"},
      {[](C& c) { c.rope_scaling.low_freq_factor = 2; }, "rope.low_freq_factor"},
      {[](C& c) { c.rope_scaling.high_freq_factor = 8; }, "rope.high_freq_factor"},
      {[](C& c) { c.rope_scaling.original_max_seq_len = 32; }, "rope.original_max_seq_len"},
      {[](C& c) { c.experts = 8; }, "experts"},
      {[](C& c) { c.experts_per_token = 1; }, "experts_per_token"},
      {[](C& c) { c.rope_scaling.attention_factor = 1.5; }, "rope.attention_factor"},
  };
  const auto with_type = [&](RopeScalingType type) {
    return changed(stretched, [&](C& c) { c.rope_scaling.type = type; });
  };
  const LlamaConfig yarn = with_type(RopeScalingType::yarn), longrope = with_type(RopeScalingType::longrope);
  EXPECT_THAT(keys_of(yarn, changed(yarn, [](C& c) { c.rope_scaling.beta_slow = 2; })), ElementsAre("rope.beta_slow"));
  EXPECT_THAT(keys_of(longrope, changed(longrope, [](C& c) { c.rope_scaling.long_factor = {2}; })),
              ElementsAre("rope.long_factor"));
  for (const auto& [change, key] : more) {
    EXPECT_EQ(keys_of(stretched, changed(stretched, change)), std::vector<std::string>{key});
  }
  EXPECT_THAT(keys_of(plain, changed(plain, [](C& c) { c.family = LlamaFamily::gpt2; })),
              ::testing::IsSupersetOf({"activation", "norm", "qkv_bias", "rope.theta", "max_seq_len"}));
}

// Checked against the parameters themselves, for every pair of these models.
TEST(ModelIdentity, ShapesAreTheSameWhereTheParametersAre) {
  using C = LlamaConfig;
  const std::vector<std::function<void(C&)>> changes = {
      [](C&) {},
      [](C& c) { c.rope_theta = 7; },
      [](C& c) { c.norm_eps = 7; },
      [](C& c) { c.sliding_window = 7; },
      [](C& c) { c.max_seq_len *= 2; },
      [](C& c) { c.dim *= 2; },
      [](C& c) { c.n_layers += 1; },
      [](C& c) { c.n_heads *= 2; },  // narrower heads: keys and values have fewer rows
      [](C& c) { c.n_heads *= 2, c.n_kv_heads *= 2; },
      [](C& c) { c.own_head_dim = c.head_dim() * 2; },
      [](C& c) { c.ffn_hidden += 8; },
      [](C& c) { c.vocab_size += 1; },
      [](C& c) { c.tie_embeddings = !c.tie_embeddings; },
      [](C& c) { c.family = LlamaFamily::mistral; },
      [](C& c) { c.family = LlamaFamily::qwen2; },
      [](C& c) { c.family = LlamaFamily::qwen3; },
      [](C& c) { c.family = LlamaFamily::qwen3, c.n_heads *= 2, c.n_kv_heads *= 2; },
      [](C& c) { c.family = LlamaFamily::gpt2, c.n_kv_heads = c.n_heads; },
      [](C& c) { c.family = LlamaFamily::gpt2, c.n_kv_heads = c.n_heads, c.max_seq_len *= 2; },
      [](C& c) { c.family = LlamaFamily::mixtral, c.experts = 4, c.experts_per_token = 2; },
      [](C& c) { c.family = LlamaFamily::mixtral, c.experts = 4, c.experts_per_token = 1; },
      [](C& c) { c.family = LlamaFamily::mixtral, c.experts = 2, c.experts_per_token = 1; },
      [](C& c) { c.family = LlamaFamily::qwen3_moe, c.experts = 2, c.experts_per_token = 1; },
      [](C& c) { c.family = LlamaFamily::gpt_oss, c.experts = 2, c.experts_per_token = 1, c.activation_limit = 7; },
      [](C& c) { c.family = LlamaFamily::gpt_oss, c.experts = 2, c.experts_per_token = 1, c.activation_limit = 5; },
      [](C& c) { c.family = LlamaFamily::olmo2; },
      [](C& c) { c.family = LlamaFamily::olmo2, c.n_heads *= 2, c.n_kv_heads *= 2; },
      [](C& c) { c.family = LlamaFamily::gemma3_text; },
      [](C& c) { c.family = LlamaFamily::smollm3, c.unrotated_layers = {0}; },
      [](C& c) { c.family = LlamaFamily::phi3, c.rotary_dim = 4; },
  };
  int same = 0;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    for (std::size_t j = 0; j < changes.size(); ++j) {
      const C a = changed(llama_flavor("debug"), changes[i]), b = changed(llama_flavor("debug"), changes[j]);
      const bool is_same = llama_parameter_shapes(a) == llama_parameter_shapes(b);
      EXPECT_EQ(have_same_shapes(model_identity(a), model_identity(b)), is_same) << i << " and " << j;
      same += i != j && is_same;
    }
  }
  EXPECT_GT(same, 20);
}

TEST(ModelIdentity, WhatDoesNotChangeResultsIsNone) {
  const LlamaConfig plain = llama_flavor("debug");
  EXPECT_TRUE(keys_of(plain, plain).empty());
  // The same head size expressed differently, and longer sequences, on which weights do not depend.
  EXPECT_TRUE(keys_of(plain, changed(plain, [](LlamaConfig& c) { c.own_head_dim = c.dim / c.n_heads; })).empty());
  EXPECT_TRUE(keys_of(plain, changed(plain, [](LlamaConfig& c) { c.max_seq_len *= 2; })).empty());
}

// A description that was written to a file and read back is the same.
TEST(ModelIdentity, FilesKeepIt) {
  for (const auto family : all_families()) {
    LlamaConfig config = llama_flavor("debug", family);
    config.tie_embeddings = !config.tie_embeddings;
    config.norm_eps = 3e-6;
    if (family == LlamaFamily::llama) {
      config.rope_scaling = {.type = RopeScalingType::llama3, .factor = 8, .original_max_seq_len = 64};
    }
    if (family == LlamaFamily::qwen3) {
      config.rope_scaling = {
          .type = RopeScalingType::yarn, .factor = 8, .original_max_seq_len = 64, .attention_factor = 1.2};
    }
    if (family == LlamaFamily::qwen3_moe) config.normalise_routing = false;
    EXPECT_TRUE(keys_of(config, llama_from_metadata(llama_metadata(config), "here")).empty()) << family_name(family);
    EXPECT_TRUE(keys_of(config, llama_config_from_hf(llama_hf_config(config, "float32"), "config.json")).empty())
        << family_name(family);
  }
}

TEST(ModelIdentity, TheTextNamesKeyAndBothValues) {
  LlamaConfig other = llama_flavor("debug");
  other.rope_theta = 500000;
  EXPECT_EQ(model_differences_text(model_differences(llama_flavor("debug"), other)),
            "\n  rope.theta: the weights were saved with 10000.0, this model has 500000.0");
}

}  // namespace
}  // namespace phalanx::models
