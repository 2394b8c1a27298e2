// Forward passes through a model that one rank has, or that is cut by layers over several (recipe C6).
//
// begin() hands a pass on: the first stage embeds the tokens, each sends hidden states to the next, the last one
// chooses tokens and sends them back to all, over the host's ways: so a device has one communicator's messages, in one
// direction, and it does not matter whether kernels of two communicators can run at the same time. finish() waits for
// the tokens of the oldest pass begun. All stages begin and finish the same passes in the same order; with as many
// passes of different rows under way as there are stages, each stage computes while the others do.
//
//   StageRunner runner(model, mesh.communicator("pp"));       // null: the model is whole
//   runner.begin(pass, cache, choose);
//   std::vector<std::int64_t> tokens = runner.finish();       // of pass.sample_rows, in its order
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
  std::vector<std::int64_t> counts;       // of real tokens, by row; empty: all
  std::vector<std::int64_t> sample_rows;  // rows of the pass behind whose last token the next one is wanted
  bool is_prefill = false;
};

class StageRunner {
 public:
  /// The model must outlive the runner. Collective over the stages, whose order is their ranks'.
  StageRunner(models::Llama& model, std::shared_ptr<Communicator> stages);

  /// The next token of a row of the pass, from its logits; called where the output layer is.
  using Choose = std::function<std::int64_t(std::int64_t row, std::span<const float> logits)>;
  void begin(const ForwardBatch& batch, nn::KvCache& cache, const Choose& choose);
  std::vector<std::int64_t> finish();

  /// The smallest of the stages' numbers. Collective.
  std::int64_t agree_on_smallest(std::int64_t number) const;

 private:
  struct InFlight {
    at::Tensor tokens;  // int64 [wanted], on the host
    std::vector<Work> sent;
  };
  at::Tensor input_of(const ForwardBatch& batch) const;

  models::Llama& model_;
  std::shared_ptr<Communicator> stages_;
  std::deque<InFlight> in_flight_;
};

}  // namespace phalanx::infer
