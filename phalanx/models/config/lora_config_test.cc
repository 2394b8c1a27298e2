#include "phalanx/models/config/lora_config.h"

#include <gtest/gtest.h>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/models/config/file_layers.h"

namespace phalanx::models {
namespace lora_config_test {

LlamaConfig two_layers() { return {.dim = 16, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_hidden = 40}; }

std::vector<std::string> layers(const std::vector<std::string>& targets, const LlamaConfig& config = two_layers()) {
  return lora_layers(config, {.rank = 4, .target_modules = targets});
}

TEST(LoraLayers, AreNamedAsInPeftAsHereOrByPatterns) {
  EXPECT_EQ(layers({"all-linear"}).size(), 14U);
  EXPECT_THAT(layers({"q_proj"}), ElementsAre("layers.0.attention.wq", "layers.1.attention.wq"));
  EXPECT_EQ(layers({"wq"}), layers({"q_proj"}));
  EXPECT_EQ(layers({"self_attn.q_proj"}), layers({"attention.wq"}));
  EXPECT_EQ(layers({"v_proj", "q_proj"}), (std::vector<std::string>{"layers.0.attention.wq", "layers.0.attention.wv",
                                                                    "layers.1.attention.wq", "layers.1.attention.wv"}));
  EXPECT_THAT(layers({"layers.1.feed_forward.*"}),
              ElementsAre("layers.1.feed_forward.w1", "layers.1.feed_forward.w2", "layers.1.feed_forward.w3"));
  EXPECT_EQ(layers({"model.layers.1.mlp.*"}), layers({"layers.1.feed_forward.*"}));
  EXPECT_EQ(layers({"*.mlp.up_proj"}), layers({"w3"}));
  EXPECT_TRUE(lora_layers(two_layers(), {}).empty());
  LlamaConfig experts = two_layers();
  experts.family = LlamaFamily::mixtral;
  experts.experts = 4;
  experts.experts_per_token = 2;
  EXPECT_EQ(layers({"all-linear"}, experts).size(), 8U);
  EXPECT_THAT(error_text<ConfigError>([&] { layers({"w1"}, experts); }), HasSubstr("experts have no adapters"));
}

TEST(LoraLayers, OfLatentAttentionAreItsMatricesAndThoseOfSharedExperts) {
  const LlamaConfig config = llama_flavor("debug", LlamaFamily::deepseek_v3);
  ASSERT_GT(config.dense_layers, 0);
  ASSERT_GT(config.shared_experts, 0);
  ASSERT_GT(config.q_lora_rank, 0);
  EXPECT_EQ(layers({"all-linear"}, config).size(), static_cast<std::size_t>(config.n_layers * (5 + 3)));
  EXPECT_EQ(layers({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}, config),
            layers({"wq_a", "wq_b", "wkv_a", "wkv_b"}, config));
  EXPECT_THAT(layers({"model.layers.0.mlp.gate_proj"}, config), ElementsAre("layers.0.feed_forward.w1"));
  const std::string last = std::to_string(config.n_layers - 1);
  EXPECT_THAT(layers({"model.layers." + last + ".mlp.shared_experts.down_proj"}, config),
              ElementsAre("layers." + last + ".moe.shared_experts.w2"));
  EXPECT_THAT(error_text<ConfigError>([&] { layers({"experts.0.w1"}, config); }),
              HasSubstr("experts have no adapters"));
}

// A released file has experts in 4 bits, with a byte for each 32 numbers, and all else in 16 bits.
TEST(LeastBytes, AreNoMoreThanThoseOfReleasedFiles) {
  for (const std::string flavor : {"gpt_oss_20b", "gpt_oss_120b"}) {
    const LlamaConfig config = llama_flavor(flavor, LlamaFamily::gpt_oss);
    const std::int64_t in_experts = config.n_layers * config.experts * 3 * config.dim * config.ffn_hidden;
    const std::int64_t bytes = in_experts / 32 * 17 + (config.parameter_count() - in_experts) * 2;
    EXPECT_LT(bytes, config.parameter_count()) << flavor;
    EXPECT_LE(least_bytes(config, {}), bytes) << flavor;
  }
  EXPECT_EQ(least_bytes(two_layers(), {}), two_layers().parameter_count());
}

TEST(LoraLayers, WrongOnesAreRefused) {
  EXPECT_THAT(error_text<ConfigError>([] {
                layers({"q_proj", "qproj"});
              }),
              AllOf(HasSubstr("'qproj' matches none of the 15 linear layers"), HasSubstr("did you mean 'q_proj'?"),
                    HasSubstr("model.layers.0.self_attn.q_proj")));
  EXPECT_THAT(error_text<ConfigError>([] { layers({}); }), HasSubstr("target_modules is empty"));
  EXPECT_THAT(error_text<ConfigError>([] { lora_layers(two_layers(), {.rank = 2, .alpha = 0}); }),
              HasSubstr("expected a rank of 0 or more"));
}

// As for PEFT, all-linear leaves it out.
TEST(LoraLayers, TheOutputLayerIsOneIfItIsNotTied) {
  EXPECT_THAT(layers({"lm_head"}), ElementsAre("output"));
  EXPECT_EQ(layers({"output"}), layers({"lm_head"}));
  EXPECT_EQ(layers({"all-linear", "lm_head"}).size(), 15U);
  EXPECT_EQ(layers({"all-linear", "lm_head"}).back(), "output");
  EXPECT_EQ(layers({"*"}), layers({"all-linear"}));
  LlamaConfig tied = two_layers();
  tied.tie_embeddings = true;
  for (const char* name : {"lm_head", "output"}) {
    EXPECT_THAT(error_text<ConfigError>([&] {
                  layers({"q_proj", name}, tied);
                }),
                AllOf(HasSubstr(std::string("target_modules: '") + name + "' is the output layer"),
                      HasSubstr("tie_embeddings"), HasSubstr("expected layers of the blocks")));
  }
  EXPECT_EQ(nf4_layers(two_layers(), {.rank = 2, .base_dtype = "nf4"}).size(), 14U);
}

// A layer of the files has an adapter as a whole, and its parts are several layers here.
TEST(LoraLayers, ThatTheFilesKeepInOneMatrixAreAllOfItsParts) {
  const LlamaConfig gpt2 = llama_flavor("debug", LlamaFamily::gpt2), phi3 = llama_flavor("debug", LlamaFamily::phi3);
  EXPECT_EQ(layers({"all-linear"}, gpt2).size(), static_cast<std::size_t>(gpt2.n_layers * 6));
  EXPECT_EQ(layers({"all-linear"}, phi3).size(), static_cast<std::size_t>(phi3.n_layers * 7));
  EXPECT_EQ(layers({"c_attn"}, gpt2), layers({"wq", "wk", "wv"}, gpt2));
  EXPECT_EQ(layers({"c_proj"}, gpt2), layers({"wo", "w2"}, gpt2));
  EXPECT_EQ(layers({"transformer.h.1.mlp.c_fc"}, gpt2), layers({"layers.1.feed_forward.w1"}, gpt2));
  EXPECT_EQ(layers({"qkv_proj", "gate_up_proj"}, phi3), layers({"wq", "wk", "wv", "w1", "w3"}, phi3));
  EXPECT_THAT(error_text<ConfigError>([&] { layers({"wq"}, gpt2); }),
              AllOf(HasSubstr("target_modules mean layers.0.attention.wq, but not layers.0.attention.w"),
                    HasSubstr("the family gpt2 keep them in one matrix, transformer.h.0.attn.c_attn"),
                    HasSubstr("such as by \"c_attn\", or none")));
  EXPECT_THAT(error_text<ConfigError>([&] {
                layers({"qkv_proj", "w1"}, phi3);
              }),
              AllOf(HasSubstr("mean layers.0.feed_forward.w1, but not layers.0.feed_forward.w3"),
                    HasSubstr("model.layers.0.mlp.gate_up_proj")));
  const std::string qkv = "layers.0.attention.w";
  EXPECT_EQ(file_layers(phi3, {qkv + "v", qkv + "o", qkv + "q", qkv + "k"}),
            (std::vector<FileLayer>{{"model.layers.0.self_attn.qkv_proj", {qkv + "q", qkv + "k", qkv + "v"}},
                                    {"model.layers.0.self_attn.o_proj", {qkv + "o"}}}));
  EXPECT_THAT(
      error_text<Error>([&] {
        file_layers(phi3, {qkv + "v", qkv + "q"});
      }),
      HasSubstr("of model.layers.0.self_attn.qkv_proj there is only layers.0.attention.wq, layers.0.attention.wv"));
}

}  // namespace lora_config_test
}  // namespace phalanx::models
