// Named configurations of the families: a small one to train from scratch, and those of released models.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/models/config/llama_config.h"

namespace phalanx::models {
namespace {

using Flavors = std::vector<std::pair<std::string, LlamaConfig>>;

// Short forms for sizes that a family's flavors share.
LlamaConfig sized(LlamaConfig config, std::int64_t dim, std::int64_t ffn_hidden, std::int64_t n_layers,
                  std::int64_t n_heads, std::int64_t n_kv_heads) {
  config.dim = dim;
  config.ffn_hidden = ffn_hidden;
  config.n_layers = n_layers;
  config.n_heads = n_heads;
  config.n_kv_heads = n_kv_heads;
  return with_layer_pattern(config);
}

LlamaConfig small(LlamaConfig config) {
  config.vocab_size = 512;
  config.tie_embeddings = false;
  return sized(config, /*dim=*/64, /*ffn_hidden=*/176, /*n_layers=*/2, /*n_heads=*/4, /*n_kv_heads=*/2);
}

LlamaConfig tied(LlamaConfig config) {
  config.tie_embeddings = true;
  return config;
}

Flavors llama_flavors() {
  return {
      // For tests and first steps.
      {"debug", {.dim = 64, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_hidden = 176, .vocab_size = 512}},
      {"5M", {}},
      {"50M", {.dim = 512, .n_layers = 8, .n_heads = 8, .n_kv_heads = 4, .ffn_hidden = 2048, .vocab_size = 16384}},
      {"llama3_debug",  // torchtitan's debugmodel
       {.dim = 256,
        .n_layers = 6,
        .n_heads = 16,
        .n_kv_heads = 16,
        .ffn_hidden = 768,
        .vocab_size = 2048,
        .rope_theta = 500000.0}},
      {"llama3_1b",
       {.dim = 2048,
        .n_layers = 16,
        .n_heads = 32,
        .n_kv_heads = 8,
        .ffn_hidden = 8192,
        .vocab_size = 128256,
        .max_seq_len = 8192,
        .rope_theta = 500000.0,
        .tie_embeddings = true}},
      {"llama3_8b",
       {.dim = 4096,
        .n_layers = 32,
        .n_heads = 32,
        .n_kv_heads = 8,
        .ffn_hidden = 14336,
        .vocab_size = 128256,
        .max_seq_len = 8192,
        .rope_theta = 500000.0}},
      {"llama3_70b",
       {.dim = 8192,
        .n_layers = 80,
        .n_heads = 64,
        .n_kv_heads = 8,
        .ffn_hidden = 28672,
        .vocab_size = 128256,
        .max_seq_len = 8192,
        .rope_theta = 500000.0}},
      {"llama3_405b",
       {.dim = 16384,
        .n_layers = 126,
        .n_heads = 128,
        .n_kv_heads = 8,
        .ffn_hidden = 53248,
        .vocab_size = 128256,
        .max_seq_len = 8192,
        .rope_theta = 500000.0}},
  };
}

Flavors mistral_flavors() {
  const LlamaConfig base{
      .family = LlamaFamily::mistral, .vocab_size = 32000, .max_seq_len = 32768, .sliding_window = 4096};
  LlamaConfig debug = small(base);
  debug.sliding_window = 64;
  return {{"debug", debug}, {"mistral_7b", sized(base, 4096, 14336, 32, 32, 8)}};
}

Flavors qwen2_flavors() {
  LlamaConfig base{.family = LlamaFamily::qwen2,
                   .vocab_size = 151936,
                   .max_seq_len = 32768,
                   .rope_theta = 1e6,
                   .norm_eps = 1e-6,
                   .tie_embeddings = true};
  Flavors flavors = {{"debug", small(base)},
                     {"qwen2_0.5b", sized(base, 896, 4864, 24, 14, 2)},
                     {"qwen2_1.5b", sized(base, 1536, 8960, 28, 12, 2)}};
  base.vocab_size = 152064;
  base.tie_embeddings = false;
  flavors.emplace_back("qwen2_7b", sized(base, 3584, 18944, 28, 28, 4));
  return flavors;
}

Flavors qwen3_flavors() {
  const LlamaConfig base{.family = LlamaFamily::qwen3,
                         .vocab_size = 151936,
                         .max_seq_len = 40960,
                         .rope_theta = 1e6,
                         .norm_eps = 1e-6,
                         .own_head_dim = 128};
  LlamaConfig debug = small(base);
  debug.own_head_dim = 32;
  return {{"debug", debug},
          {"qwen3_0.6b", tied(sized(base, 1024, 3072, 28, 16, 8))},
          {"qwen3_1.7b", tied(sized(base, 2048, 6144, 28, 16, 8))},
          {"qwen3_4b", tied(sized(base, 2560, 9728, 36, 32, 8))},
          {"qwen3_8b", sized(base, 4096, 12288, 36, 32, 8)},
          {"qwen3_14b", sized(base, 5120, 17408, 40, 40, 8)},
          {"qwen3_32b", sized(base, 5120, 25600, 64, 64, 8)}};
}

Flavors gpt2_flavors() {
  const LlamaConfig base{.family = LlamaFamily::gpt2, .vocab_size = 50257, .max_seq_len = 1024, .tie_embeddings = true};
  LlamaConfig debug = small(base);
  debug.n_kv_heads = debug.n_heads;
  return {{"debug", debug},
          {"gpt2_124m", sized(base, 768, 3072, 12, 12, 12)},
          {"gpt2_355m", sized(base, 1024, 4096, 24, 16, 16)},
          {"gpt2_774m", sized(base, 1280, 5120, 36, 20, 20)},
          {"gpt2_1.5b", sized(base, 1600, 6400, 48, 25, 25)}};
}

Flavors mixtral_flavors() {
  const LlamaConfig base{.family = LlamaFamily::mixtral,
                         .vocab_size = 32000,
                         .max_seq_len = 32768,
                         .rope_theta = 1e6,
                         .experts = 8,
                         .experts_per_token = 2};
  LlamaConfig debug = small(base);
  debug.experts = 4;
  debug.ffn_hidden = 96;
  return {{"debug", debug}, {"mixtral_8x7b", sized(base, 4096, 14336, 32, 32, 8)}};
}

Flavors qwen3_moe_flavors() {
  const LlamaConfig base{.family = LlamaFamily::qwen3_moe,
                         .vocab_size = 151936,
                         .max_seq_len = 40960,
                         .rope_theta = 1e6,
                         .norm_eps = 1e-6,
                         .own_head_dim = 128,
                         .experts = 128,
                         .experts_per_token = 8};
  LlamaConfig debug = small(base);
  debug.own_head_dim = 32;
  debug.experts = 8;
  debug.experts_per_token = 2;
  debug.ffn_hidden = 48;
  return {{"debug", debug},
          {"qwen3_30b_a3b", sized(base, 2048, 768, 48, 32, 4)},
          {"qwen3_235b_a22b", sized(base, 4096, 1536, 94, 64, 4)}};
}

Flavors olmo2_flavors() {
  const LlamaConfig base{
      .family = LlamaFamily::olmo2, .vocab_size = 100352, .max_seq_len = 4096, .rope_theta = 5e5, .norm_eps = 1e-6};
  return {{"debug", small(base)},
          {"olmo2_1b", sized(base, 2048, 8192, 16, 16, 16)},
          {"olmo2_7b", sized(base, 4096, 11008, 32, 32, 32)},
          {"olmo2_13b", sized(base, 5120, 13824, 40, 40, 40)},
          {"olmo2_32b", sized(base, 5120, 27648, 64, 40, 8)}};
}

Flavors smollm3_flavors() {
  const LlamaConfig base{.family = LlamaFamily::smollm3,
                         .vocab_size = 128256,
                         .max_seq_len = 65536,
                         .rope_theta = 5e6,
                         .norm_eps = 1e-6,
                         .tie_embeddings = true};
  LlamaConfig debug = small(base);
  debug.n_layers = 4;  // one of them without a rotary embedding
  return {{"debug", with_layer_pattern(debug)}, {"smollm3_3b", sized(base, 2048, 11008, 36, 16, 4)}};
}

Flavors phi3_flavors() {
  LlamaConfig base{.family = LlamaFamily::phi3, .vocab_size = 32064, .max_seq_len = 4096, .sliding_window = 2047};
  LlamaConfig debug = small(base);
  debug.sliding_window = 0;
  debug.rotary_dim = 12;
  Flavors flavors = {{"debug", debug}, {"phi3_mini", sized(base, 3072, 8192, 32, 32, 32)}};
  base.sliding_window = 0;
  base.vocab_size = 100352;
  base.max_seq_len = 16384;
  base.rope_theta = 250000.0;
  flavors.emplace_back("phi4", sized(base, 5120, 17920, 40, 40, 10));
  return flavors;
}

Flavors gemma3_text_flavors() {
  const LlamaConfig base{.family = LlamaFamily::gemma3_text,
                         .vocab_size = 262144,
                         .max_seq_len = 32768,
                         .rope_theta = 1e6,
                         .norm_eps = 1e-6,
                         .tie_embeddings = true,
                         .own_head_dim = 256,
                         .sliding_window = 512,
                         .window_rope_theta = 1e4,
                         .query_scalar = 256};
  LlamaConfig debug = small(base);
  debug.own_head_dim = 32;
  debug.query_scalar = 32;
  debug.sliding_window = 32;
  debug.n_layers = 6;  // one of them sees all positions
  debug.tie_embeddings = true;
  return {{"debug", with_layer_pattern(debug)},
          {"gemma3_270m", sized(base, 640, 2048, 18, 4, 1)},
          {"gemma3_1b", sized(base, 1152, 6912, 26, 4, 1)}};
}

LlamaConfig small_deepseek(LlamaConfig config) {
  config = small(config);
  config.n_layers = 3;  // the first without experts
  config.n_kv_heads = config.n_heads;
  config.own_head_dim = 24;
  config.rotary_dim = 8;
  config.v_head_dim = 16;
  config.kv_lora_rank = 32;
  config.q_lora_rank = 48;
  config.experts = 8;
  config.experts_per_token = 2;
  config.ffn_hidden = 48;
  config.dense_layers = 1;
  config.dense_hidden = 176;
  config.shared_experts = 1;
  config.expert_groups = 4;
  config.groups_per_token = 2;
  return config;
}

Flavors deepseek_v2_flavors() {
  LlamaConfig base{.family = LlamaFamily::deepseek_v2,
                   .vocab_size = 102400,
                   .max_seq_len = 4096,
                   .norm_eps = 1e-6,
                   .own_head_dim = 192,
                   .experts = 64,
                   .experts_per_token = 6,
                   .normalise_routing = false,
                   .rotary_dim = 64,
                   .kv_lora_rank = 512,
                   .v_head_dim = 128,
                   .dense_layers = 1,
                   .dense_hidden = 10944,
                   .shared_experts = 2};
  Flavors flavors = {{"debug", small_deepseek(base)}, {"deepseek_v2_lite", sized(base, 2048, 1408, 27, 16, 16)}};
  base.q_lora_rank = 1536;
  base.experts = 160;
  base.dense_hidden = 12288;
  base.expert_groups = 8;
  base.groups_per_token = 3;
  base.routed_scaling = 16;
  flavors.emplace_back("deepseek_v2_236b", sized(base, 5120, 1536, 60, 128, 128));
  return flavors;
}

Flavors deepseek_v3_flavors() {
  LlamaConfig base{.family = LlamaFamily::deepseek_v3,
                   .vocab_size = 129280,
                   .max_seq_len = 4096,
                   .norm_eps = 1e-6,
                   .own_head_dim = 192,
                   .experts = 256,
                   .experts_per_token = 8,
                   .rotary_dim = 64,
                   .kv_lora_rank = 512,
                   .q_lora_rank = 1536,
                   .v_head_dim = 128,
                   .dense_layers = 3,
                   .dense_hidden = 18432,
                   .shared_experts = 1,
                   .expert_groups = 8,
                   .groups_per_token = 4,
                   .routed_scaling = 2.5};
  Flavors flavors = {{"debug", small_deepseek(base)}, {"deepseek_v3_671b", sized(base, 7168, 2048, 61, 128, 128)}};
  // Moonlight: the same parts, smaller.
  base.vocab_size = 163840;
  base.max_seq_len = 8192;
  base.rope_theta = 50000.0;
  base.norm_eps = 1e-5;
  base.experts = 64;
  base.experts_per_token = 6;
  base.q_lora_rank = 0;
  base.dense_layers = 1;
  base.dense_hidden = 11264;
  base.shared_experts = 2;
  base.expert_groups = base.groups_per_token = 0;
  base.routed_scaling = 2.446;
  flavors.emplace_back("moonlight_16b_a3b", sized(base, 2048, 1408, 27, 16, 16));
  return flavors;
}

Flavors gpt_oss_flavors() {
  LlamaConfig base{.family = LlamaFamily::gpt_oss,
                   .vocab_size = 201088,
                   .max_seq_len = 4096,
                   .rope_theta = 150000.0,
                   .own_head_dim = 64,
                   .sliding_window = 128,
                   .experts = 32,
                   .experts_per_token = 4,
                   .activation_limit = 7.0};
  LlamaConfig debug = small(base);
  debug.own_head_dim = 32;
  debug.sliding_window = 32;
  debug.experts = 8;
  debug.experts_per_token = 2;
  debug.ffn_hidden = 48;
  Flavors flavors = {{"debug", debug}, {"gpt_oss_20b", sized(base, 2880, 2880, 24, 64, 8)}};
  base.experts = 128;
  flavors.emplace_back("gpt_oss_120b", sized(base, 2880, 2880, 36, 64, 8));
  return flavors;
}

Flavors granite_flavors() {
  LlamaConfig base{.family = LlamaFamily::granite,
                   .vocab_size = 49155,
                   .max_seq_len = 4096,
                   .tie_embeddings = true,
                   .embedding_multiplier = 12.0,
                   .residual_multiplier = 0.22,
                   .attention_multiplier = 1.0 / 64,
                   .logits_scaling = 8.0};
  LlamaConfig debug = small(base);
  debug.attention_multiplier = 1.0 / 16;
  Flavors flavors = {{"debug", debug}, {"granite3_2b", sized(base, 2048, 8192, 40, 32, 8)}};
  base.attention_multiplier = 1.0 / 128;
  base.logits_scaling = 16.0;
  flavors.emplace_back("granite3_8b", sized(base, 4096, 12800, 40, 32, 8));
  return flavors;
}

Flavors flavors_of(LlamaFamily family) {
  switch (family) {
    case LlamaFamily::llama:
      return llama_flavors();
    case LlamaFamily::mistral:
      return mistral_flavors();
    case LlamaFamily::qwen2:
      return qwen2_flavors();
    case LlamaFamily::qwen3:
      return qwen3_flavors();
    case LlamaFamily::gpt2:
      return gpt2_flavors();
    case LlamaFamily::mixtral:
      return mixtral_flavors();
    case LlamaFamily::qwen3_moe:
      return qwen3_moe_flavors();
    case LlamaFamily::olmo2:
      return olmo2_flavors();
    case LlamaFamily::smollm3:
      return smollm3_flavors();
    case LlamaFamily::phi3:
      return phi3_flavors();
    case LlamaFamily::gemma3_text:
      return gemma3_text_flavors();
    case LlamaFamily::deepseek_v2:
      return deepseek_v2_flavors();
    case LlamaFamily::deepseek_v3:
      return deepseek_v3_flavors();
    case LlamaFamily::gpt_oss:
      return gpt_oss_flavors();
    case LlamaFamily::granite:
      return granite_flavors();
  }
  return {};
}

}  // namespace

LlamaConfig with_layer_pattern(LlamaConfig config) {
  const std::int64_t period = config.traits().layer_period;
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = period - 1; period > 0 && layer < config.n_layers; layer += period) layers.push_back(layer);
  if (period == 0) return config;
  (config.traits().some_unrotated ? config.unrotated_layers : config.full_layers) = layers;
  return config;
}

LlamaConfig llama_flavor(const std::string& name, LlamaFamily family) {
  for (const auto& [known, config] : flavors_of(family)) {
    if (known == name) return config;
  }
  if (const auto other = family_of_flavor(name)) {
    throw ConfigError(fmt::format("the flavor '{}' is of the model {}, not of {}: expected [model] name = \"{}\"", name,
                                  family_name(*other), family_name(family), family_name(*other)));
  }
  throw ConfigError(fmt::format("unknown flavor '{}' of the model {}{}; known: {}", name, family_name(family),
                                did_you_mean(name, llama_flavor_names(family)),
                                fmt::join(llama_flavor_names(family), ", ")));
}

std::optional<LlamaFamily> family_of_flavor(const std::string& name) {
  for (const LlamaFamily family : all_families()) {
    const Flavors flavors = flavors_of(family);
    if (std::ranges::find(flavors, name, &Flavors::value_type::first) != flavors.end()) return family;
  }
  return std::nullopt;
}

std::vector<std::string> all_flavor_names() {
  std::vector<std::string> names;
  for (const LlamaFamily family : all_families()) {
    for (std::string& name : llama_flavor_names(family)) {
      if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
    }
  }
  return names;
}

std::vector<std::string> llama_flavor_names(LlamaFamily family) {
  std::vector<std::string> names;
  for (const auto& flavor : flavors_of(family)) names.push_back(flavor.first);
  return names;
}

}  // namespace phalanx::models
