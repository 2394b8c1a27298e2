// Sampler chooses the next token from a row of logits. It does not use torch.
//
// The order of steps is that of most libraries: make tokens that already occurred less likely (repetition_penalty),
// divide by the temperature, keep the top_k largest, keep the smallest set of those whose probabilities sum to top_p,
// draw from what is left. Equal logits rank by id, the lower first.
//
// The draw is a pure function of (logits, seed, position). So a request gives the same tokens in any batch and at any
// time, up to the rounding of the logits themselves.
//
//   Sampler sampler({.temperature = 0.8, .top_p = 0.95, .seed = 7}, vocab_size);
//   std::int64_t token = sampler.sample(logits, /*position=*/generated.size());
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace phalanx::infer {

struct SamplingOptions {
  double temperature = 1.0;  // 0: always the likeliest token (greedy)
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0;        // 1: all
  // Divides the logits of tokens that already are in the prompt or the result if they are positive; else multiplies
  // them (Keskar et al. 2019, CTRL). 1: no change.
  double repetition_penalty = 1.0;
  std::uint64_t seed = 0;

  bool greedy() const { return temperature == 0.0 || top_k == 1; }
  /// Throws ConfigError naming the option that is out of range.
  void validate() const;
};

/// Throws Error where Sampler::sample() does: `largest` is NaN (as a logit is) or infinite.
void check_largest_logit(double largest);

class Sampler {
 public:
  Sampler(const SamplingOptions& options, std::int64_t vocab_size);

  /// Marks these tokens as having occurred, for the repetition penalty.
  void note(std::span<const std::int64_t> tokens);

  /// `logits` has vocab_size entries. -inf excludes a token; NaN and +inf throw Error.
  std::int64_t sample(std::span<const float> logits, std::uint64_t position);

  /// The tokens that could be drawn, likeliest first, with their probabilities: what sample() draws from.
  std::vector<std::pair<std::int64_t, double>> distribution(std::span<const float> logits);

 private:
  struct Candidate {
    float logit;
    std::int32_t id;
    bool operator<(const Candidate& other) const {  // likeliest first
      return logit != other.logit ? logit > other.logit : id < other.id;
    }
  };
  double uniform(std::uint64_t position) const;
  /// The logits after the repetition penalty: the given ones, or penalised_.
  std::span<const float> without_repetition(std::span<const float> logits);
  std::int64_t draw_from_all(std::span<const float> logits, float largest, double uniform);
  /// Fills candidates_ with what top_k and top_p leave, in order, and weights_ with their unnormalised probabilities.
  void choose_candidates(std::span<const float> logits, float largest);

  SamplingOptions options_;
  std::vector<Candidate> candidates_;  // reused between calls: no allocation per token
  std::vector<double> weights_;
  std::vector<float> penalised_;
  std::vector<std::int64_t> noted_;  // tokens that occurred, each once
  std::vector<bool> is_noted_;
};

}  // namespace phalanx::infer
