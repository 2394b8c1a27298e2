#include "phalanx/models/config/model_family.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>

namespace phalanx::models {
namespace {

// In the order of LlamaFamily.
constexpr std::array<FamilyTraits, 15> kFamilies = {{
    {.family = LlamaFamily::llama, .name = "llama"},
    {.family = LlamaFamily::mistral, .name = "mistral", .window = true},
    {.family = LlamaFamily::qwen2, .name = "qwen2", .window = true, .qkv_bias = true},
    {.family = LlamaFamily::qwen3, .name = "qwen3", .window = true, .qk_norm = QkNorm::each_head},
    {.family = LlamaFamily::gpt2, .name = "gpt2", .qkv_bias = true, .output_bias = true},
    {.family = LlamaFamily::mixtral, .name = "mixtral", .window = true, .experts = true},
    {.family = LlamaFamily::qwen3_moe,
     .name = "qwen3_moe",
     .window = true,
     .qk_norm = QkNorm::each_head,
     .experts = true},
    {.family = LlamaFamily::olmo2, .name = "olmo2", .qk_norm = QkNorm::all_heads, .norms = NormPlacement::after},
    {.family = LlamaFamily::smollm3, .name = "smollm3", .window = true, .some_unrotated = true, .layer_period = 4},
    {.family = LlamaFamily::phi3, .name = "phi3", .window = true, .partial_rotation = true},
    {.family = LlamaFamily::gemma3_text,
     .name = "gemma3_text",
     .window = true,
     .qk_norm = QkNorm::each_head,
     .norms = NormPlacement::both,
     .activation = GatedActivation::gelu_tanh,
     .norms_add_one = true,
     .scales_embeddings = true,
     .layers_have_thetas = true,
     .scales_queries = true,
     .layer_period = 6},
    {.family = LlamaFamily::deepseek_v2,
     .name = "deepseek_v2",
     .experts = true,
     .partial_rotation = true,
     .latent_attention = true},
    {.family = LlamaFamily::deepseek_v3,
     .name = "deepseek_v3",
     .experts = true,
     .partial_rotation = true,
     .latent_attention = true,
     .router = RouterForm::biased_sigmoid},
    {.family = LlamaFamily::gpt_oss,
     .name = "gpt_oss",
     .window = true,
     .qkv_bias = true,
     .output_bias = true,
     .expert_biases = true,
     .sinks = true,
     .activation = GatedActivation::clamped_silu,
     .experts = true,
     .layer_period = 2},
    {.family = LlamaFamily::granite, .name = "granite", .multipliers = true},
}};

constexpr bool are_in_order() {
  for (std::size_t i = 0; i < kFamilies.size(); ++i) {
    if (static_cast<std::size_t>(kFamilies[i].family) != i) return false;
  }
  return true;
}
static_assert(are_in_order());

}  // namespace

const FamilyTraits& traits_of(LlamaFamily family) noexcept { return kFamilies[static_cast<std::size_t>(family)]; }

std::vector<LlamaFamily> all_families() {
  std::vector<LlamaFamily> families;
  for (const FamilyTraits& known : kFamilies) families.push_back(known.family);
  return families;
}

const char* family_name(LlamaFamily family) { return traits_of(family).name; }

std::string family_names() {
  std::vector<std::string> names;
  for (const FamilyTraits& known : kFamilies) names.emplace_back(known.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::optional<LlamaFamily> family_from_name(std::string_view name) {
  for (const FamilyTraits& known : kFamilies) {
    if (name == known.name) return known.family;
  }
  return std::nullopt;
}

}  // namespace phalanx::models
