#include "phalanx/models/config/llama_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/models/config/vocabulary_split.h"

namespace phalanx::models {
namespace {

/// The divisor of `number` nearest to `wanted`. Of two equally near ones, the smaller.
std::int64_t nearest_divisor(std::int64_t number, std::int64_t wanted) {
  std::int64_t nearest = 1;
  const auto consider = [&](std::int64_t divisor) {
    const std::int64_t distance = std::abs(divisor - wanted), least = std::abs(nearest - wanted);
    if (distance < least || (distance == least && divisor < nearest)) nearest = divisor;
  };
  for (std::int64_t small = 1; small * small <= number; ++small) {
    if (number % small == 0) consider(small), consider(number / small);
  }
  return nearest;
}

constexpr std::int64_t kLargestSize = std::int64_t{1} << 31;
constexpr std::int64_t kMostLayers = 10'000;  // each has a dozen tensors to list and to hold
constexpr double kMostParameters = 1e15;
constexpr std::int64_t kMostExperts = 4096;

template <class Number>
Number count_attention(const LlamaConfig& config) {
  const auto dim = static_cast<Number>(config.dim), head_dim = static_cast<Number>(config.head_dim());
  const Number q_dim = static_cast<Number>(config.n_heads) * head_dim;
  if (!config.has_latent_attention()) {
    const Number kv_dim = static_cast<Number>(config.n_kv_heads) * head_dim;
    const auto norms = static_cast<Number>(config.has_qk_norm() ? config.q_norm_size() + config.k_norm_size() : 0);
    return 2 * dim * q_dim + 2 * dim * kv_dim + (config.has_qkv_bias() ? q_dim + 2 * kv_dim : 0) +
           (config.has_output_bias() ? dim : 0) + (config.has_sinks() ? static_cast<Number>(config.n_heads) : 0) +
           norms;
  }
  const auto q_rank = static_cast<Number>(config.q_lora_rank), kv_rank = static_cast<Number>(config.kv_lora_rank);
  const auto rotated = static_cast<Number>(config.rotary_dim);
  const Number values = static_cast<Number>(config.n_heads) * static_cast<Number>(config.v_head_dim);
  const Number queries = config.q_lora_rank == 0 ? dim * q_dim : dim * q_rank + q_rank + q_rank * q_dim;
  const Number keys = static_cast<Number>(config.n_heads) * (head_dim - rotated);
  return queries + dim * (kv_rank + rotated) + kv_rank + kv_rank * (keys + values) + values * dim;
}

/// The count with this many feed-forward nets in each layer. In double, so that no model is too large to be counted.
template <class Number>
Number count_parameters(const LlamaConfig& config, std::int64_t nets) {
  const auto dim = static_cast<Number>(config.dim), hidden = static_cast<Number>(config.ffn_hidden);
  const auto dense = static_cast<Number>(config.dense_layers), layers = static_cast<Number>(config.n_layers);
  const Number norm = config.is_gpt2() ? 2 * dim : dim;
  const Number units = static_cast<Number>(nets) * hidden + static_cast<Number>(config.shared_units());
  const Number layer = count_attention<Number>(config) + static_cast<Number>(config.norms_per_layer()) * norm +
                       (config.is_gpt2() ? dim + hidden : 0);
  Number net = static_cast<Number>(config.ffn_matrices()) * dim * units + static_cast<Number>(config.experts) * dim;
  if (config.has_expert_net_biases()) {
    net += static_cast<Number>(nets) * (2 * hidden + dim) + static_cast<Number>(config.experts);
  }
  const Number dense_net = static_cast<Number>(config.ffn_matrices()) * dim * static_cast<Number>(config.dense_hidden);
  return layers * layer + (layers - dense) * net + dense * dense_net + norm +
         static_cast<Number>(config.vocab_size) * dim * (config.tie_embeddings ? 1 : 2) +
         (config.is_gpt2() ? static_cast<Number>(config.max_seq_len) * dim : 0);
}

std::int64_t nets_of_layer(const LlamaConfig& config) { return config.has_experts() ? config.experts : 1; }

void check_scaling(const RopeScaling& rope) {
  if (rope.type == RopeScalingType::none) return;
  if (!(rope.factor >= 1.0)) {
    throw ConfigError(fmt::format("model: rope scaling by a factor of {}: expected 1 or above", rope.factor));
  }
  if (rope.type == RopeScalingType::linear) return;
  if (rope.original_max_seq_len < 1) {
    throw ConfigError(fmt::format("model: rope scaling from original_max_position_embeddings = {}: expected at least 1",
                                  rope.original_max_seq_len));
  }
  if (rope.type == RopeScalingType::llama3 &&
      !(rope.low_freq_factor > 0.0 && rope.high_freq_factor > rope.low_freq_factor)) {
    throw ConfigError(
        fmt::format("model: rope scaling with low_freq_factor = {} and high_freq_factor = {}: expected 0 < low < high",
                    rope.low_freq_factor, rope.high_freq_factor));
  }
  if (!(rope.attention_factor > 0.0)) {
    throw ConfigError(
        fmt::format("model: rope scaling with attention_factor = {}: expected above 0", rope.attention_factor));
  }
  if (rope.type == RopeScalingType::yarn && !(rope.beta_slow > 0.0 && rope.beta_fast >= rope.beta_slow)) {
    throw ConfigError(
        fmt::format("model: rope scaling with beta_fast = {} and beta_slow = {}: expected 0 < beta_slow <= beta_fast",
                    rope.beta_fast, rope.beta_slow));
  }
}

void check_longrope(const RopeScaling& rope, std::int64_t pairs) {
  for (const auto& [key, factors] :
       {std::pair("short_factor", &rope.short_factor), {"long_factor", &rope.long_factor}}) {
    if (std::ssize(*factors) != pairs) {
      throw ConfigError(fmt::format("model: rope scaling with {} of {} numbers: expected one for each of the {} pairs",
                                    key, factors->size(), pairs));
    }
    for (const double factor : *factors) {
      if (factor > 0.0) continue;
      throw ConfigError(fmt::format("model: rope scaling with {} of {}: expected numbers above 0", key, factor));
    }
  }
}

/// Layer numbers must be ascending and of the model.
void check_layers(const char* key, const std::vector<std::int64_t>& layers, std::int64_t n_layers) {
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] >= 0 && layers[i] < n_layers && (i == 0 || layers[i] > layers[i - 1])) continue;
    throw ConfigError(fmt::format("model: {} names layer {}: expected layers of 0 to {}, in ascending order", key,
                                  layers[i], n_layers - 1));
  }
}

[[noreturn]] void refuse_for_family(const char* what, LlamaFamily family) {
  throw ConfigError(fmt::format("model: {}: not in a model of the family {}", what, family_name(family)));
}

}  // namespace

std::int64_t LlamaConfig::q_norm_size() const noexcept {
  return traits().qk_norm == QkNorm::all_heads ? n_heads * head_dim() : head_dim();
}

std::int64_t LlamaConfig::k_norm_size() const noexcept {
  return traits().qk_norm == QkNorm::all_heads ? n_kv_heads * head_dim() : head_dim();
}

std::int64_t LlamaConfig::window_of(std::int64_t layer) const {
  return std::ranges::binary_search(full_layers, layer) ? 0 : sliding_window;
}

bool LlamaConfig::is_rotated(std::int64_t layer) const {
  return !is_gpt2() && !std::ranges::binary_search(unrotated_layers, layer);
}

void LlamaConfig::validate() const {
  const std::pair<const char*, std::int64_t> sizes[] = {
      {"dim", dim},
      {"n_layers", n_layers},
      {"n_heads", n_heads},
      {"n_kv_heads", n_kv_heads},
      {"ffn_hidden", ffn_hidden},
      {"vocab_size", vocab_size},
      {"max_seq_len", max_seq_len},
  };
  for (const auto& [key, value] : sizes) {
    if (value < 1) throw ConfigError(fmt::format("model: {} = {}: expected a positive number", key, value));
    const std::int64_t most = std::string_view(key) == "n_layers" ? kMostLayers : kLargestSize;
    if (value > most) throw ConfigError(fmt::format("model: {} = {}: expected at most {}", key, value, most));
  }
  validate_family();
  validate_latent_attention();
  validate_experts();
  if (own_head_dim < 0 || own_head_dim > kLargestSize || own_head_dim % 2 != 0) {
    throw ConfigError(
        fmt::format("model: head_dim = {}: the rotary embedding turns pairs, so it must be even and above 0, or 0 for "
                    "dim / n_heads",
                    own_head_dim));
  }
  if (own_head_dim == 0 && dim % n_heads != 0) {
    throw ConfigError(
        fmt::format("model: head_dim = dim / n_heads must be whole, but dim = {} and n_heads = {}; "
                    "nearest: n_heads = {}",
                    dim, n_heads, nearest_divisor(dim, n_heads)));
  }
  if (!is_gpt2() && head_dim() % 2 != 0) {
    throw ConfigError(
        fmt::format("model: the rotary embedding turns pairs, so head_dim = dim / n_heads = {} / {} = {} "
                    "must be even; nearest: dim = {}",
                    dim, n_heads, head_dim(), (head_dim() + 1) * n_heads));
  }
  if (n_heads % n_kv_heads != 0) {
    throw ConfigError(
        fmt::format("model: n_heads / n_kv_heads query heads share a key head, but {} / {} is not whole; "
                    "nearest: n_kv_heads = {}",
                    n_heads, n_kv_heads, nearest_divisor(n_heads, n_kv_heads)));
  }
  if (const auto count = count_parameters<double>(*this, nets_of_layer(*this)); count > kMostParameters) {
    throw ConfigError(
        fmt::format("model: these sizes make {:.1e} parameters: expected at most {:.0e}", count, kMostParameters));
  }
  if (!(rope_theta > 0.0)) throw ConfigError(fmt::format("model: rope_theta = {}: expected above 0", rope_theta));
  if (!(norm_eps >= 0.0)) throw ConfigError(fmt::format("model: norm_eps = {}: expected 0 or above", norm_eps));
  const bool has_no_window = !traits().window;
  if (sliding_window < 0 || (sliding_window > 0 && has_no_window)) {
    throw ConfigError(fmt::format("model: sliding_window = {}: expected 0 in a model of the family {}, else 0 or above",
                                  sliding_window, has_no_window ? family_name(family) : "llama"));
  }
  check_scaling(rope_scaling);
  if (const std::int64_t rotated = rotary_dim != 0 ? rotary_dim : head_dim();
      rope_scaling.type == RopeScalingType::dynamic && rotated < 4) {
    throw ConfigError(fmt::format("model: {} = {}: dynamic rope scaling needs at least 4",
                                  rotary_dim != 0 ? "rotary_dim" : "head_dim", rotated));
  }
  validate_layers();
  validate_multipliers();
}

void LlamaConfig::validate_multipliers() const {
  const bool has_some =
      embedding_multiplier != 1.0 || residual_multiplier != 1.0 || attention_multiplier != 0.0 || logits_scaling != 1.0;
  if (has_some && !traits().multipliers) refuse_for_family("multipliers", family);
  if (embedding_multiplier > 0.0 && residual_multiplier > 0.0 && attention_multiplier >= 0.0 && logits_scaling > 0.0) {
    return;
  }
  throw ConfigError(
      fmt::format("model: embedding_multiplier = {}, residual_multiplier = {}, attention_multiplier = {} and "
                  "logits_scaling = {}: expected numbers above 0",
                  embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling));
}

void LlamaConfig::validate_layers() const {
  if (!full_layers.empty() && sliding_window == 0) {
    throw ConfigError("model: full_layers without a sliding_window: expected none, as no layer has a window");
  }
  check_layers("full_layers", full_layers, n_layers);
  check_layers("unrotated_layers", unrotated_layers, n_layers);
  if (!unrotated_layers.empty() && !traits().some_unrotated) refuse_for_family("unrotated_layers", family);
  if (window_rope_theta != 0.0 && !traits().layers_have_thetas) refuse_for_family("window_rope_theta", family);
  if (query_scalar != 0.0 && !traits().scales_queries) refuse_for_family("query_scalar", family);
  const bool has_limit = traits().activation == GatedActivation::clamped_silu;
  if (activation_limit != 0.0 && !has_limit) refuse_for_family("activation_limit", family);
  if (has_limit && !(activation_limit > 0.0)) {
    throw ConfigError(fmt::format("model: activation_limit = {}: expected above 0", activation_limit));
  }
  if (rotary_dim != 0 && !traits().partial_rotation) refuse_for_family("rotary_dim", family);
  if (!normalise_routing && !has_experts()) refuse_for_family("normalise_routing = false", family);
  if (!(window_rope_theta >= 0.0) || !(query_scalar >= 0.0)) {
    throw ConfigError(fmt::format("model: window_rope_theta = {} and query_scalar = {}: expected 0 or above",
                                  window_rope_theta, query_scalar));
  }
  if (rotary_dim < 0 || rotary_dim >= head_dim() || rotary_dim % 2 != 0) {
    throw ConfigError(fmt::format(
        "model: rotary_dim = {}: the rotary embedding turns pairs, so it must be even and below head_dim = {}, or 0 "
        "for all of it",
        rotary_dim, head_dim()));
  }
  if (rope_scaling.type == RopeScalingType::longrope) {
    check_longrope(rope_scaling, (rotary_dim != 0 ? rotary_dim : head_dim()) / 2);
  }
}

void LlamaConfig::validate_family() const {
  if (has_experts() &&
      !(experts >= 1 && experts <= kMostExperts && experts_per_token >= 1 && experts_per_token <= experts)) {
    throw ConfigError(
        fmt::format("model: experts = {} and experts_per_token = {}: expected 1 to {} experts, and at least one "
                    "per token but no more than there are",
                    experts, experts_per_token, kMostExperts));
  }
  if (!has_experts() && (experts != 0 || experts_per_token != 0)) {
    throw ConfigError(
        fmt::format("model: experts = {} and experts_per_token = {}: expected 0 in a model of the family {}", experts,
                    experts_per_token, family_name(family)));
  }
  if (!is_gpt2()) return;
  if (n_kv_heads != n_heads || own_head_dim != 0 || rope_scaling.type != RopeScalingType::none) {
    throw ConfigError(fmt::format(
        "model: a model of the family gpt2 has as many key and value heads as query heads, of dim / n_heads "
        "elements, and no rope scaling: found n_heads = {}, n_kv_heads = {}, head_dim = {}",
        n_heads, n_kv_heads, head_dim()));
  }
}

void LlamaConfig::validate_latent_attention() const {
  if (!has_latent_attention()) {
    if (kv_lora_rank != 0 || q_lora_rank != 0 || v_head_dim != 0) refuse_for_family("latent attention", family);
    if (rope_scaling.mscale_all_dim != 0.0) refuse_for_family("mscale_all_dim", family);
    return;
  }
  if (kv_lora_rank < 1 || kv_lora_rank > kLargestSize || q_lora_rank < 0 || q_lora_rank > kLargestSize) {
    throw ConfigError(
        fmt::format("model: kv_lora_rank = {} and q_lora_rank = {}: expected 1 or above, and 0 (none) or above",
                    kv_lora_rank, q_lora_rank));
  }
  if (rotary_dim < 1 || rotary_dim % 2 != 0 || own_head_dim <= rotary_dim || own_head_dim % 2 != 0) {
    throw ConfigError(
        fmt::format("model: latent attention with heads of {} elements, of which {} are rotated "
                    "(qk_nope_head_dim and qk_rope_head_dim): expected even numbers above 0 of both kinds",
                    own_head_dim, rotary_dim));
  }
  if (v_head_dim < 1 || v_head_dim > own_head_dim) {
    throw ConfigError(fmt::format("model: v_head_dim = {}: expected 1 to the size of a head of queries, {}", v_head_dim,
                                  own_head_dim));
  }
  if (n_kv_heads != n_heads) {
    throw ConfigError(
        fmt::format("model: latent attention has as many key heads as query heads: found n_heads = {}, "
                    "n_kv_heads = {}",
                    n_heads, n_kv_heads));
  }
}

void LlamaConfig::validate_experts() const {
  const bool has_none = dense_layers == 0 && dense_hidden == 0 && shared_experts == 0 && expert_groups == 0 &&
                        groups_per_token == 0 && routed_scaling == 1.0;
  if (!has_latent_attention() && !has_none) refuse_for_family("dense_layers, shared_experts or expert_groups", family);
  if (has_none) return;
  if (dense_layers < 0 || dense_layers > n_layers || dense_hidden < 0 || dense_hidden > kLargestSize ||
      (dense_layers > 0) != (dense_hidden > 0)) {
    throw ConfigError(
        fmt::format("model: dense_layers = {} and dense_hidden = {}: expected 0 to {} layers, and hidden "
                    "units where there are such layers",
                    dense_layers, dense_hidden, n_layers));
  }
  if (shared_experts < 0 || shared_experts > kMostExperts) {
    throw ConfigError(fmt::format("model: shared_experts = {}: expected 0 to {}", shared_experts, kMostExperts));
  }
  if (!(routed_scaling > 0.0)) {
    throw ConfigError(fmt::format("model: routed_scaling = {}: expected above 0", routed_scaling));
  }
  if (expert_groups == 0 && groups_per_token == 0) return;
  const bool are_groups = expert_groups > 0 && groups_per_token > 0 && groups_per_token <= expert_groups &&
                          experts % expert_groups == 0 &&
                          experts_per_token <= experts / expert_groups * groups_per_token;
  if (!are_groups) {
    throw ConfigError(fmt::format(
        "model: {} experts, {} per token, in expert_groups = {}, of which groups_per_token = {}: expected groups of "
        "equal size, and enough experts in those of a token",
        experts, experts_per_token, expert_groups, groups_per_token));
  }
  if (traits().router == RouterForm::biased_sigmoid && experts / expert_groups < 2) {
    throw ConfigError(
        fmt::format("model: {} experts in expert_groups = {}: expected two or more in each, whose scores "
                    "are those of the group",
                    experts, expert_groups));
  }
}

void LlamaConfig::validate_tensor_parallel(int ranks, std::int64_t seq_len) const {
  const auto refuse_unless_divided = [&](const char* what, const char* key, std::int64_t value) {
    if (value % ranks == 0) return;
    const std::int64_t below = value / ranks * ranks;
    throw ConfigError(fmt::format(
        "tensor parallel over {} ranks: {} are split over them, but {} % ranks = {} % {} = {}, expected 0; nearest: "
        "{} = {}{}, or tp = {}",
        ranks, what, key, value, ranks, value % ranks, key, below > 0 ? fmt::format("{} or ", below) : "",
        below + ranks, nearest_divisor(value, std::min<std::int64_t>(ranks, value))));
  };
  if (ranks < 1) throw ConfigError(fmt::format("tensor parallel over {} ranks: expected at least 1", ranks));
  refuse_unless_divided("query heads", "n_heads", n_heads);
  if (n_kv_heads % ranks != 0 && ranks % n_kv_heads != 0) {
    std::int64_t below = ranks, above = ranks;
    const auto fits = [&](std::int64_t tp) { return n_kv_heads % tp == 0 || tp % n_kv_heads == 0; };
    while (!fits(below)) --below;
    while (!fits(above)) ++above;
    throw ConfigError(fmt::format(
        "tensor parallel over {} ranks: key and value heads are split over them or held by several, but n_kv_heads % "
        "ranks = {} % {} = {} and ranks % n_kv_heads = {} % {} = {}, expected one to be 0; nearest: tp = {} or {}",
        ranks, n_kv_heads, ranks, n_kv_heads % ranks, ranks, n_kv_heads, ranks % n_kv_heads, below, above));
  }
  refuse_unless_divided("hidden units of the feed-forward", "ffn_hidden", ffn_hidden);
  if (dense_hidden != 0) refuse_unless_divided("hidden units of the first layers", "dense_hidden", dense_hidden);
  if (splits_vocabulary(*this, ranks)) refuse_unless_divided("ids of the vocabulary", "vocab_size", vocab_size);
  if (seq_len != 0) refuse_unless_divided("positions (sequence parallel)", "seq_len", seq_len);
}

std::int64_t LlamaConfig::parameter_count() const noexcept {
  return count_parameters<std::int64_t>(*this, nets_of_layer(*this));
}

std::int64_t LlamaConfig::active_parameter_count() const noexcept {
  return count_parameters<std::int64_t>(*this, has_experts() ? experts_per_token : 1);
}

std::int64_t LlamaConfig::attention_parameter_count() const noexcept { return count_attention<std::int64_t>(*this); }

double LlamaConfig::flops_per_token(double seq) const noexcept {
  const std::int64_t looked_up = (tie_embeddings ? 0 : vocab_size * dim) + (is_gpt2() ? max_seq_len * dim : 0);
  const std::int64_t in_products = active_parameter_count() - looked_up;
  return 6.0 * static_cast<double>(in_products) +
         6.0 * static_cast<double>(n_layers) * static_cast<double>(n_heads * (head_dim() + value_dim())) * seq;
}

}  // namespace phalanx::models
