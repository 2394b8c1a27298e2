// StageRunner runs forward passes through a model that is whole on one rank, or cut by layers over several ranks
// (recipe C6).
//
// begin() starts a pass. The first stage embeds the tokens, and each stage sends hidden states to the next. The last
// stage chooses tokens and sends them back to all stages, through host memory. So on a device there are messages of
// only one communicator, in one direction, and it does not matter whether kernels of two communicators can run
// concurrently. finish() waits for the tokens of the oldest pass begun.
//
// REQUIRES: all stages begin and finish the same passes in the same order.
//
// With as many passes of different rows in flight as there are stages, all stages compute at the same time.
//
//   StageRunner runner(model, mesh.communicator("pp"));       // null: the model is whole
//   runner.begin(batch, cache, choose);
//   std::vector<std::int64_t> tokens = runner.finish();       // of batch.sample_rows, in its order
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/nn/kv_cache.h"

namespace phalanx::models {
class Llama;
}

namespace phalanx::infer {

struct ForwardBatch {
  std::int64_t first_row = 0;             // of the cache
  at::Tensor tokens;                      // int64 [rows, n], on the host
  std::vector<std::int64_t> counts;       // real tokens by row; empty: all are real
  std::vector<std::int64_t> sample_rows;  // rows of the pass for which the next token is chosen
  bool is_prefill = false;
};

class StageRunner {
 public:
  /// Collective over the stages. The order of the stages is that of their ranks.
  /// REQUIRES: the model outlives the runner.
  StageRunner(models::Llama& model, std::shared_ptr<Communicator> stages);

  /// How the next token of a row of the pass is chosen. Called on the rank with the output layer.
  struct Choose {
    std::function<std::int64_t(std::int64_t row, std::span<const float> logits)> from_logits;
    /// Whether the row takes the likeliest token. If all rows do, a device finds them, and no logits go to the host.
    std::function<bool(std::int64_t row)> takes_likeliest;
    /// `logit`: that token's; NaN if any logit is.
    std::function<std::int64_t(std::int64_t row, std::int64_t token, double logit)> likeliest;
  };
  void begin(const ForwardBatch& batch, nn::KvCache& cache, const Choose& choose);
  std::vector<std::int64_t> finish();

  /// Collective. The smallest of the stages' numbers.
  std::int64_t agree_on_smallest(std::int64_t number) const;

 private:
  struct InFlight {
    at::Tensor tokens;  // int64 [sample_rows], on the host
    std::vector<Work> sent;
  };
  at::Tensor input_of(const ForwardBatch& batch) const;
  static void choose_tokens(const ForwardBatch& batch, const at::Tensor& logits, const Choose& choose,
                            const at::Tensor& tokens);

  models::Llama& model_;
  std::shared_ptr<Communicator> stages_;
  std::deque<InFlight> in_flight_;
};

}  // namespace phalanx::infer
