// Text generation: prompts in, continuations out, with a key-value cache, in batches, token by token.
//
// Requests are taken in order, `max_batch` at a time; prompts of a batch may have any lengths. A request ends at one of
// its stop tokens (not part of the result), after max_new_tokens, or when prompt and result fill the model's
// max_seq_len. Its tokens depend on its own prompt, options and seed, not on the batch it runs in (up to rounding).
//
//   infer::Generator generator(*model, {.max_batch = 8});
//   auto results = generator.generate({{.prompt = ids, .max_new_tokens = 64, .sampling = {.temperature = 0.0}}},
//                                     [](std::size_t request, std::int64_t token) { ... });
//
// generate() runs on the calling thread and the model's device, records no gradient, and may throw from the callback.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "phalanx/infer/sampling.h"

namespace phalanx::models {
class Llama;
}

namespace phalanx::infer {

struct Request {
  std::vector<std::int64_t> prompt;  // at least one token, fewer than the model's max_seq_len
  std::int64_t max_new_tokens = 128;
  SamplingOptions sampling;
  std::vector<std::int64_t> stop_tokens;
};

enum class FinishReason { stop_token, max_new_tokens, max_seq_len };
std::string_view name_of(FinishReason reason);

struct Completion {
  std::vector<std::int64_t> tokens;  // without the prompt and the stop token
  FinishReason reason = FinishReason::max_new_tokens;
};

struct GenerationStats {
  std::int64_t prompt_tokens = 0;
  double prefill_seconds = 0;
  std::int64_t decoded_tokens = 0;  // all but the first of each request, which comes from the prefill
  double decode_seconds = 0;
};

struct GeneratorOptions {
  std::int64_t max_batch = 8;
  std::int64_t prefill_chunk = 512;  // tokens a row in one pass: bounds the memory of long prompts
};

class Generator {
 public:
  explicit Generator(models::Llama& model, GeneratorOptions options = {});

  using OnToken = std::function<void(std::size_t request, std::int64_t token)>;
  /// Every request is checked before the first is run; an Error names the request and what is wrong with it.
  std::vector<Completion> generate(const std::vector<Request>& requests, const OnToken& on_token = {});

  /// Summed over all calls.
  const GenerationStats& stats() const { return stats_; }

 private:
  void check(const std::vector<Request>& requests) const;
  void run_batch(std::span<const Request> requests, std::size_t first, std::vector<Completion>& completions,
                 const OnToken& on_token);

  models::Llama& model_;
  GeneratorOptions options_;
  GenerationStats stats_;
};

}  // namespace phalanx::infer
