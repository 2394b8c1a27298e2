// One learnt vector for each token id.
//
// Where this rank holds some of the rows (Module::set_shard), ids of other rows give zeros, so that the sum over the
// ranks is the whole: vocabulary-parallel, parallel/tensor/styles.h.
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
                                              // (of a table in parts: a DataError, found on the CPU alone)

  at::Tensor weight;  // [count, dim]

 private:
  at::Tensor look_up_own_rows(const at::Tensor& table, const at::Tensor& ids, const Shard& shard) const;
};

}  // namespace phalanx::nn
