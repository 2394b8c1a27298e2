// Generator generates text: prompts in, continuations out. It uses a key-value cache of bounded memory and continuous
// batching: when a sequence ends, its row goes to the next request.
//
// A request ends at one of its stop tokens (not part of the result), before one of its stop strings, after
// max_new_tokens, or when prompt and result fill the model's max_seq_len. Its tokens depend on its own prompt, options
// and seed. They do not depend on the batch it runs in nor on the model's layout, up to the rounding of logits. (On the
// CPU in fp32 decoding gives a row the same bits in every batch of up to 16 rows, kernels/skinny_gemm.h.)
//
//   infer::Generator generator(*model, {.max_batch = 8});
//   auto results = generator.generate({{.prompt = ids, .max_new_tokens = 64, .sampling = {.temperature = 0.0}}},
//                                     [](std::size_t request, std::int64_t token) { print(request, token); });
//
// If a model is cut by tensor parallelism (models/llama_parallel.h, without sequence parallelism) or by layers
// (options.stages), all its ranks run it together. Each makes a Generator and passes the same requests, in the same
// order.
//
// generate() runs on the calling thread and the model's device, records no gradient, and may throw from callbacks. It
// runs the model in evaluation mode, without dropout, and puts it back into the mode that it was in.
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
  std::int64_t max_batch = 8;            // sequences in flight at once
  std::int64_t prefill_chunk = 512;      // tokens per row in one pass: bounds the memory of long prompts
  std::int64_t cache_bytes = 0;          // limit of keys and values; fewer sequences run at once. 0: as max_batch needs
  std::shared_ptr<Communicator> stages;  // the pipeline stages of a model cut by layers; null: it is not cut by layers
  /// For stop strings and the texts of completions. Null: neither.
  /// REQUIRES: it outlives the generator.
  const data::BpeTokenizer* tokenizer = nullptr;
};

/// Requests as they arrive and completions as they are ready. Both are numbered in the order in which next() returned
/// the requests.
struct RequestStream {
  /// Returns at most `count` more requests; empty: there are no more.
  std::function<std::vector<Request>(std::int64_t count)> next;
  std::function<void(std::size_t number, Completion completion)> done;
  std::function<void(std::size_t number, std::int64_t token)> on_token = {};
  std::int64_t longest = 0;  // most positions (prompt and result) of any request, for the cache; 0: max_seq_len
};

class Generator {
 public:
  explicit Generator(models::Llama& model, GeneratorOptions options = {});
  ~Generator();

  using OnToken = std::function<void(std::size_t request, std::int64_t token)>;
  /// Every request is checked before the first is run. Throws Error that names the request and what is wrong with it.
  /// Long prompts run first, so that rows are padded little.
  std::vector<Completion> generate(const std::vector<Request>& requests, const OnToken& on_token = {});

  /// Runs until there are no more requests. Throws Error at a request that cannot run.
  void run(const RequestStream& requests);

  /// What is wrong with a request; empty: nothing.
  std::string fault_of(const Request& request) const;
  /// The cache positions that a request needs.
  std::int64_t positions_of(const Request& request) const;

  /// Summed over all calls.
  const GenerationStats& stats() const { return stats_; }

 private:
  void run(const RequestStream& requests, std::int64_t max_batch);
  /// The rows of so many positions each that the cache's memory holds.
  std::int64_t rows_for(std::int64_t positions, std::int64_t requested) const;

  models::Llama& model_;
  GeneratorOptions options_;
  std::unique_ptr<StageRunner> runner_;
  GenerationStats stats_;
};

}  // namespace phalanx::infer
