// How likely a model holds given texts to be: the log-likelihood of the end of each, given its beginning.
//
// Perplexity is exp(-sum of log-likelihoods / tokens) of windows over a text; a multiple-choice question is answered by
// the likeliest of its continuations.
//
//   infer::Evaluator evaluator(*model, {.max_batch = 8});
//   std::vector<double> scores = evaluator.log_likelihoods({{.tokens = {1, 17, 4, 99}, .first = 2}});  // of 4, 99
//
// A model cut by tensor parallelism (without sequence parallelism) or by its layers is run by all its ranks together,
// which are given the same texts and get the same results. Runs on the calling thread, records no gradient.
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
  std::vector<std::int64_t> tokens;  // at most the model's max_seq_len and one more: the last is no input
  std::int64_t first = 1;            // tokens from here on are scored, each given all before it; 1 or more
};

/// Windows over `size` tokens, in order: [begin, end) and the first token that is scored in it. Every token but the
/// first is scored once; a window's first `seq - stride` inputs are there for what they tell of the others.
struct TextWindow {
  std::int64_t begin = 0, end = 0, first = 0;
};
std::vector<TextWindow> windows_of(std::int64_t size, std::int64_t seq, std::int64_t stride);

struct EvaluatorOptions {
  std::int64_t max_batch = 8;            // texts in one forward pass
  std::shared_ptr<Communicator> stages;  // ranks that have one part of the layers each; null: the model is whole
};

class Evaluator {
 public:
  explicit Evaluator(models::Llama& model, EvaluatorOptions options = {});

  /// Natural logarithms, summed over each text's scored tokens. An Error names the text and what is wrong with it.
  std::vector<double> log_likelihoods(const std::vector<ScoredText>& texts);

 private:
  void check(const std::vector<ScoredText>& texts) const;

  models::Llama& model_;
  EvaluatorOptions options_;
};

}  // namespace phalanx::infer
