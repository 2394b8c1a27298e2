// One learnt vector per token id.
//
// If this rank holds only some of the rows (Module::set_shard), ids of other rows give zeros, so that the sum over the
// ranks is the whole result: vocabulary-parallel, parallel/tensor/styles.h.
#pragma once

#include <cstdint>
#include <optional>

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
                                              // (of a split table: a DataError, checked only on the CPU)

  /// From now on the rows that are looked up are converted to this type: of a table that is stored in another one than
  /// the activations have.
  void set_output_dtype(at::ScalarType dtype) { output_dtype_ = dtype; }

  at::Tensor weight;  // [count, dim]

 private:
  at::Tensor look_up_own_rows(const at::Tensor& table, const at::Tensor& ids, const Shard& shard) const;

  std::optional<at::ScalarType> output_dtype_;
};

}  // namespace phalanx::nn
