#include "phalanx/models/config/llama_part.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/layout/balance_stages.h"

namespace phalanx::models {
namespace {

// Makes the parts from a list of half-layer counts.
std::vector<LlamaPart> parts_of(const std::vector<std::int64_t>& halves) {
  std::vector<LlamaPart> parts;
  std::int64_t begin = 0;
  for (const std::int64_t count : halves) {
    parts.push_back({.begin = begin, .end = begin + count});
    begin += count;
  }
  parts.front().embedding = true;
  parts.back().head = true;
  return parts;
}

}  // namespace

std::string LlamaPart::text() const {
  std::string result = embedding ? "embedding" : "";
  const auto add = [&](const std::string& more) { result += (result.empty() ? "" : ", ") + more; };
  if (end > begin) {
    add(fmt::format("layers {} to {}", static_cast<double>(begin) / 2.0, static_cast<double>(end) / 2.0));
  }
  if (head) add("norm and output");
  return result;
}

LlamaPart full_llama(const LlamaConfig& config) {
  return {.begin = 0, .end = 2 * config.n_layers, .embedding = true, .head = true};
}

std::vector<LlamaPart> divide_llama(const LlamaConfig& config, const std::vector<double>& layers) {
  std::vector<std::int64_t> halves;
  double sum = 0.0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const double count = 2.0 * layers[i];
    const bool may_be_empty = i == 0 || i + 1 == layers.size();
    if (!(count >= 0.0) || !(count < 1e9) || count != std::floor(count) || (count == 0.0 && !may_be_empty)) {
      throw ConfigError(fmt::format(
          "a pipeline of layers [{}]: stage {} cannot have {} layers; expected a multiple of 0.5 (a half is a layer's "
          "attention or its feed-forward net), above 0 but for the first and the last stage",
          fmt::join(layers, ", "), i, layers[i]));
    }
    halves.push_back(static_cast<std::int64_t>(count));
    sum += layers[i];
  }
  if (layers.empty() || sum != static_cast<double>(config.n_layers)) {
    throw ConfigError(fmt::format("a pipeline of layers [{}]: their sum is {}; expected n_layers = {}",
                                  fmt::join(layers, ", "), sum, config.n_layers));
  }
  return parts_of(halves);
}

std::vector<double> llama_costs(const LlamaConfig& config, std::int64_t seq) {
  const auto dim = static_cast<double>(config.dim), head = static_cast<double>(config.head_dim());
  const double q = static_cast<double>(config.n_heads) * head, kv = static_cast<double>(config.n_kv_heads) * head;
  // The causal half of q k^T and p v, or what a window leaves of it.
  const auto attention = [&](std::int64_t layer) {
    const std::int64_t window = config.window_of(layer);
    const double pairs = q * static_cast<double>(window > 0 ? std::min(seq, 2 * window) : seq);
    return pairs + (config.has_latent_attention() ? static_cast<double>(config.attention_parameter_count())
                                                  : dim * (2 * q + 2 * kv));
  };
  const auto feed_forward = [&](std::int64_t layer) {
    const bool has_experts = config.has_experts(layer);
    const std::int64_t units =
        has_experts ? config.experts_per_token * config.ffn_hidden + config.shared_units() : config.dense_units();
    return static_cast<double>(config.ffn_matrices() * units) * dim +
           (has_experts ? static_cast<double>(config.experts) * dim : 0);
  };
  std::vector<double> costs;
  for (std::int64_t i = 0; i < config.n_layers; ++i) {
    costs.push_back(attention(i));
    costs.push_back(feed_forward(i));
  }
  costs.push_back(dim * static_cast<double>(config.vocab_size));
  return costs;
}

std::vector<LlamaPart> balance_llama(const LlamaConfig& config, int stages, const std::vector<double>& costs) {
  const std::int64_t halves = 2 * config.n_layers;
  if (stages < 1 || stages > halves) {
    throw ConfigError(
        fmt::format("{} pipeline stages for {} layers: expected 1 to 2 * n_layers = {} (a stage has at "
                    "least a layer's attention or its feed-forward net)",
                    stages, config.n_layers, halves));
  }
  if (static_cast<std::int64_t>(costs.size()) != halves + 1) {
    throw ConfigError(
        fmt::format("{} costs for a model of {} layers: expected 2 * n_layers + 1 = {}, one for each "
                    "attention, each feed-forward net and the output",
                    costs.size(), config.n_layers, halves + 1));
  }
  std::vector<std::int64_t> counts;
  for (const int count : balance_stages(costs, stages)) counts.push_back(count);
  --counts.back();  // the output is not a half-layer
  return parts_of(counts);
}

std::vector<LlamaPart> balance_llama(const LlamaConfig& config, int stages, std::int64_t seq) {
  return balance_llama(config, stages, llama_costs(config, seq));
}

}  // namespace phalanx::models
