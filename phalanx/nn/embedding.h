// One learnt vector for each token id.
#pragma once

#include <cstdint>

#include "phalanx/nn/module.h"

namespace phalanx::nn {

struct EmbeddingOptions {
  std::int64_t count = 0;  // ids 0 .. count - 1
  std::int64_t dim = 0;
};

class Embedding : public Module {
 public:
  explicit Embedding(const EmbeddingOptions& options, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& ids);  // int64 [...] -> [..., dim]; an id out of range is torch's IndexError

  at::Tensor weight;  // [count, dim]
};

}  // namespace phalanx::nn
