#include "phalanx/nn/embedding.h"

#include "phalanx/kernels/embedding.h"

namespace phalanx::nn {

Embedding::Embedding(const EmbeddingOptions& options, TensorOptionsOfModule tensor) : Module("Embedding") {
  weight = make_parameter("weight", {options.count, options.dim}, tensor);
}

at::Tensor Embedding::forward(const at::Tensor& ids) { return kernels::embedding(weight, ids); }

}  // namespace phalanx::nn
