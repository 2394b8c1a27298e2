// Evaluator computes how likely a model holds given texts to be: the log-likelihood of the end of each text, given its
// beginning.
//
// Perplexity is exp(-sum of log-likelihoods / tokens) of windows over a text. The answer to a multiple-choice question
// is the likeliest of its continuations.
//
//   infer::Evaluator evaluator(*model, {.max_batch = 8});
//   std::vector<double> scores = evaluator.log_likelihoods({{.tokens = {1, 17, 4, 99}, .first = 2}});  // of 4, 99
//
// If a model is cut by tensor parallelism (without sequence parallelism) or by its layers, all its ranks run it
// together. They pass the same texts and get the same results. It runs on the calling thread and records no gradient.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace phalanx {
class Communicator;
}
namespace phalanx::models {
class Llama;
}

namespace phalanx::infer {

struct ScoredText {
  std::vector<std::int64_t> tokens;  // at most the model's max_seq_len plus one: the last is not an input
  std::int64_t first = 1;            // 1 or more; tokens from here on are scored, each given all tokens before it
  /// By token, 0 for those from `first` on that are only read; empty: all are scored.
  std::vector<std::uint8_t> is_scored = {};
};

/// A window over `size` tokens: [begin, end), and the first token that is scored in it. windows_of() returns them in
/// order. Every token except the first is scored once. The first `seq - stride` inputs of a window are only context.
struct TextWindow {
  std::int64_t begin = 0, end = 0, first = 0;
};
std::vector<TextWindow> windows_of(std::int64_t size, std::int64_t seq, std::int64_t stride);

struct EvaluatorOptions {
  std::int64_t max_batch = 8;            // texts in one forward pass
  std::shared_ptr<Communicator> stages;  // the pipeline stages of a model cut by layers; null: it is not cut by layers
};

class Evaluator {
 public:
  explicit Evaluator(models::Llama& model, EvaluatorOptions options = {});

  /// Natural logarithms, summed over each text's scored tokens. Throws Error that names the text and what is wrong.
  std::vector<double> log_likelihoods(const std::vector<ScoredText>& texts);

 private:
  void check(const std::vector<ScoredText>& texts) const;

  models::Llama& model_;
  EvaluatorOptions options_;
};

}  // namespace phalanx::infer
