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

/// The count with this many feed-forward nets in each layer. In double, so that no model is too large to be counted.
template <class Number>
Number count_parameters(const LlamaConfig& config, std::int64_t nets) {
  const auto dim = static_cast<Number>(config.dim), head_dim = static_cast<Number>(config.head_dim());
  const auto hidden = static_cast<Number>(config.ffn_hidden);
  const Number q_dim = static_cast<Number>(config.n_heads) * head_dim;
  const Number kv_dim = static_cast<Number>(config.n_kv_heads) * head_dim;
  const Number norm = config.is_gpt2() ? 2 * dim : dim;
  const auto qk_norms = static_cast<Number>(config.has_qk_norm() ? config.q_norm_size() + config.k_norm_size() : 0);
  const Number layer = 2 * dim * q_dim + 2 * dim * kv_dim + static_cast<Number>(config.norms_per_layer()) * norm +
                       static_cast<Number>(nets * config.ffn_matrices()) * dim * hidden +
                       static_cast<Number>(config.experts) * dim + (config.is_gpt2() ? 2 * dim + hidden : 0) +
                       (config.has_qkv_bias() ? q_dim + 2 * kv_dim : 0) + qk_norms;
  return static_cast<Number>(config.n_layers) * layer + norm +
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
  if (rope_scaling.type == RopeScalingType::dynamic && head_dim() < 4) {
    throw ConfigError(fmt::format("model: head_dim = {}: dynamic rope scaling needs at least 4", head_dim()));
  }
  validate_layers();
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
  if (splits_vocabulary(*this, ranks)) refuse_unless_divided("ids of the vocabulary", "vocab_size", vocab_size);
  if (seq_len != 0) refuse_unless_divided("positions (sequence parallel)", "seq_len", seq_len);
}

std::int64_t LlamaConfig::parameter_count() const noexcept {
  return count_parameters<std::int64_t>(*this, nets_of_layer(*this));
}

std::int64_t LlamaConfig::active_parameter_count() const noexcept {
  return count_parameters<std::int64_t>(*this, has_experts() ? experts_per_token : 1);
}

double LlamaConfig::flops_per_token(double seq) const noexcept {
  const std::int64_t looked_up = (tie_embeddings ? 0 : vocab_size * dim) + (is_gpt2() ? max_seq_len * dim : 0);
  const std::int64_t in_products = active_parameter_count() - looked_up;
  return 6.0 * static_cast<double>(in_products) +
         12.0 * static_cast<double>(n_layers) * static_cast<double>(n_heads * head_dim()) * seq;
}

}  // namespace phalanx::models
