#include "phalanx/infer/jobs/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/base/philox.h"

namespace phalanx::infer {
namespace {

constexpr const char* kNoNumbers = ": are the weights damaged, or too large for 16 bits?";

/// The index of the largest logit, the lowest among equals. It uses several running maxima, so that comparisons do not
/// wait for each other.
std::size_t argmax(std::span<const float> logits) {
  constexpr std::size_t kLanes = 16;
  float best[kLanes];
  std::fill_n(best, kLanes, logits[0]);
  const std::size_t whole = logits.size() / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      best[lane] = logits[i + lane] > best[lane] ? logits[i + lane] : best[lane];
  float largest = *std::max_element(best, best + kLanes);
  for (std::size_t i = whole; i < logits.size(); ++i) largest = std::max(largest, logits[i]);
  return static_cast<std::size_t>(std::find(logits.begin(), logits.end(), largest) - logits.begin());
}

bool has_nan(std::span<const float> logits) {
  bool found = false;
  for (const float logit : logits) found |= logit != logit;
  return found;
}

}  // namespace

void SamplingOptions::validate() const {
  if (!(temperature >= 0.0 && std::isfinite(temperature)))
    throw ConfigError(fmt::format("temperature is {}: expected 0 (greedy) or more", temperature));
  if (top_k < 0) throw ConfigError(fmt::format("top_k is {}: expected 0 (all tokens) or more", top_k));
  if (!(top_p > 0.0 && top_p <= 1.0))
    throw ConfigError(fmt::format("top_p is {}: expected more than 0 and at most 1 (all tokens)", top_p));
  if (!(repetition_penalty > 0.0 && std::isfinite(repetition_penalty)))
    throw ConfigError(fmt::format("repetition_penalty is {}: expected more than 0 (1: none)", repetition_penalty));
}

Sampler::Sampler(const SamplingOptions& options, std::int64_t vocab_size) : options_(options) {
  options.validate();
  if (!options_.greedy()) {
    candidates_.reserve(static_cast<std::size_t>(vocab_size));
    weights_.reserve(static_cast<std::size_t>(vocab_size));
  }
  if (options_.repetition_penalty != 1.0) is_noted_.resize(static_cast<std::size_t>(vocab_size));
}

void Sampler::note(std::span<const std::int64_t> tokens) {
  if (is_noted_.empty()) return;
  for (const std::int64_t token : tokens) {
    if (is_noted_.at(static_cast<std::size_t>(token))) continue;
    is_noted_[static_cast<std::size_t>(token)] = true;
    noted_.push_back(token);
  }
}

std::span<const float> Sampler::without_repetition(std::span<const float> logits) {
  if (noted_.empty()) return logits;
  penalised_.assign(logits.begin(), logits.end());
  const auto penalty = static_cast<float>(options_.repetition_penalty);
  for (const std::int64_t token : noted_) {
    float& logit = penalised_[static_cast<std::size_t>(token)];
    logit = logit > 0 ? logit / penalty : logit * penalty;
  }
  return penalised_;
}

void check_largest_logit(double largest) {
  if (std::isnan(largest)) throw Error(fmt::format("cannot sample: the model's logits hold NaN{}", kNoNumbers));
  if (!std::isfinite(largest)) throw Error(fmt::format("cannot sample: the model's logits are infinite{}", kNoNumbers));
}

std::int64_t Sampler::sample(std::span<const float> given, std::uint64_t position) {
  const std::span<const float> logits = without_repetition(given);
  check_largest_logit(logits.empty() || has_nan(logits) ? std::nan("") : 0.0);
  const std::size_t likeliest = argmax(logits);
  const float largest = logits[likeliest];
  check_largest_logit(largest);
  if (options_.greedy()) return static_cast<std::int64_t>(likeliest);
  const double u = uniform(position);
  if (options_.top_k == 0 && options_.top_p == 1.0) return draw_from_all(logits, largest, u);
  choose_candidates(logits, largest);
  double total = 0;
  for (const double weight : weights_) total += weight;
  double left = u * total;
  for (std::size_t i = 0; i + 1 < candidates_.size(); ++i) {
    left -= weights_[i];
    if (left < 0) return candidates_[i].id;
  }
  return candidates_.back().id;
}

std::vector<std::pair<std::int64_t, double>> Sampler::distribution(std::span<const float> given) {
  const std::span<const float> logits = without_repetition(given);
  const auto likeliest = argmax(logits);
  if (options_.greedy()) return {{static_cast<std::int64_t>(likeliest), 1.0}};
  choose_candidates(logits, logits[likeliest]);
  double total = 0;
  for (const double weight : weights_) total += weight;
  std::vector<std::pair<std::int64_t, double>> result;
  for (std::size_t i = 0; i < candidates_.size(); ++i) result.emplace_back(candidates_[i].id, weights_[i] / total);
  return result;
}

double Sampler::uniform(std::uint64_t position) const {
  // One substream per position: the draw does not depend on how many came before it.
  return PhiloxStream(options_.seed, position).uniform();
}

std::int64_t Sampler::draw_from_all(std::span<const float> logits, float largest, double u) {
  weights_.resize(logits.size());
  const double scale = 1.0 / options_.temperature;
  double total = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    weights_[i] = std::exp((static_cast<double>(logits[i]) - largest) * scale);
    total += weights_[i];
  }
  double left = u * total;
  std::size_t last = 0;  // the last token with a weight, in case rounding leaves a rest
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] == 0) continue;
    last = i;
    left -= weights_[i];
    if (left < 0) break;
  }
  return static_cast<std::int64_t>(last);
}

void Sampler::choose_candidates(std::span<const float> logits, float largest) {
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) candidates_.push_back({logits[i], static_cast<std::int32_t>(i)});
  if (options_.top_k > 0 && static_cast<std::size_t>(options_.top_k) < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + (options_.top_k - 1), candidates_.end());
    candidates_.resize(static_cast<std::size_t>(options_.top_k));
  }
  const double scale = 1.0 / options_.temperature;
  const auto weight_of = [&](const Candidate& c) { return std::exp((static_cast<double>(c.logit) - largest) * scale); };
  double total = 0;
  if (options_.top_p < 1.0)
    for (const Candidate& candidate : candidates_) total += weight_of(candidate);
  // Few tokens are likely: sort from the front, in growing steps, only as far as top_p reaches.
  weights_.clear();
  double sum = 0;
  for (std::size_t sorted = 0, step = 256; sorted < candidates_.size(); step *= 8) {
    const std::size_t until = options_.top_p < 1.0 ? std::min(candidates_.size(), sorted + step) : candidates_.size();
    std::partial_sort(candidates_.begin() + static_cast<std::ptrdiff_t>(sorted),
                      candidates_.begin() + static_cast<std::ptrdiff_t>(until), candidates_.end());
    for (; sorted < until; ++sorted) {
      const double weight = weight_of(candidates_[sorted]);
      if (weight == 0 || (options_.top_p < 1.0 && sorted > 0 && sum >= options_.top_p * total)) {
        candidates_.resize(sorted);
        return;
      }
      weights_.push_back(weight);
      sum += weight;
    }
  }
}

}  // namespace phalanx::infer
