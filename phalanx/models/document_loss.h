// DocumentLoss: a loss of documents rather than tokens, as preference tuning has one: a function of the log-likelihoods
// that documents have, the sums over their labels of log p(label | tokens of the document before it).
//
//   DocumentLoss loss{.documents = numbers, .count = 2, .of = [](const at::Tensor& log_likelihoods) { ... }};
//   model->loss(tokens, labels,
//               {.documents = boundaries, .divisor = pairs_of_the_global_batch, .document_loss = &loss});
//
// The model computes the likelihoods without gradients, asks for the loss and its gradient, and then takes the gradient
// of the tokens' cross entropy, each weighted by its document's part: the same gradient. So the head is computed twice,
// and its logits are never held as a whole. All ranks that share documents ask with the same likelihoods.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace phalanx::models {

struct DocumentLoss {
  struct Value {
    at::Tensor loss;      // 0-dim, before it is divided by LlamaLossOptions::divisor
    at::Tensor gradient;  // [count], of this loss by the log-likelihoods
  };
  at::Tensor documents;    // int64 [batch, seq]: the number of each token's document; 0 where there is none
  std::int64_t count = 0;  // documents
  std::function<Value(const at::Tensor& log_likelihoods)> of;  // float64 [count], on the labels' device
};

}  // namespace phalanx::models
