// Text generation: prompts in, continuations out, with a key-value cache of bounded memory and continuous batching:
// when a sequence ends, its row goes to the next request.
//
// A request ends at one of its stop tokens (not part of the result), before one of its stop strings, after
// max_new_tokens, or when prompt and result fill the model's max_seq_len. Its tokens depend on its own prompt, options
// and seed, not on the batch it runs in nor on the model's layout (up to the rounding of logits; on the CPU in fp32
// decoding gives a row the same bits in every batch of up to 16 rows, kernels/skinny_gemm.h).
//
//   infer::Generator generator(*model, {.max_batch = 8});
//   auto results = generator.generate({{.prompt = ids, .max_new_tokens = 64, .sampling = {.temperature = 0.0}}},
//                                     [](std::size_t request, std::int64_t token) { ... });
//
// A model cut by tensor parallelism (models/llama_parallel.h, without sequence parallelism) or by layers
// (options.stages) is run by all its ranks together: each makes a Generator and gives it the same requests, in the same
// order.
//
// generate() runs on the calling thread and the model's device, records no gradient, and may throw from callbacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "phalanx/infer/request.h"

namespace phalanx {
class Communicator;
}
namespace phalanx::data {
class BpeTokenizer;
}
namespace phalanx::models {
class Llama;
}

namespace phalanx::infer {

class StageRunner;

struct GeneratorOptions {
  std::int64_t max_batch = 8;        // sequences under way at once
  std::int64_t prefill_chunk = 512;  // tokens a row in one pass: bounds the memory of long prompts
  std::int64_t cache_bytes = 0;      // of keys and values, at most; 0: what max_batch sequences need. Fewer run at once
  std::shared_ptr<Communicator> stages;  // ranks that have one part of the layers each; null: the model is whole
  /// For stop strings and the texts of completions; must outlive the generator. Null: neither.
  const data::BpeTokenizer* tokenizer = nullptr;
};

/// Requests as they come and completions as they are ready, both numbered in the order in which requests were taken.
struct RequestStream {
  /// At most so many more; none: there are no more.
  std::function<std::vector<Request>(std::int64_t count)> next;
  std::function<void(std::size_t number, Completion completion)> done;
  std::function<void(std::size_t number, std::int64_t token)> on_token = {};
  std::int64_t longest = 0;  // prompt and result of the longest of them, for the cache; 0: the model's max_seq_len
};

class Generator {
 public:
  explicit Generator(models::Llama& model, GeneratorOptions options = {});
  ~Generator();

  using OnToken = std::function<void(std::size_t request, std::int64_t token)>;
  /// Every request is checked before the first is run; an Error names the request and what is wrong with it. Long
  /// prompts first, so that rows are padded little.
  std::vector<Completion> generate(const std::vector<Request>& requests, const OnToken& on_token = {});

  /// Until there are no more. A request that cannot run is an Error then.
  void run(const RequestStream& requests);

  /// What is wrong with a request; empty: nothing.
  std::string fault_of(const Request& request) const;
  /// Positions of the cache that it needs.
  std::int64_t positions_of(const Request& request) const;

  /// Summed over all calls.
  const GenerationStats& stats() const { return stats_; }

 private:
  void run(const RequestStream& requests, std::int64_t max_batch);
  /// Rows that the cache's memory has room for, of so many positions each.
  std::int64_t rows_for(std::int64_t positions, std::int64_t requested) const;

  models::Llama& model_;
  GeneratorOptions options_;
  std::unique_ptr<StageRunner> runner_;
  GenerationStats stats_;
};

}  // namespace phalanx::infer
