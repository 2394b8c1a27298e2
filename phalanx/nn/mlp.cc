#include "phalanx/nn/mlp.h"

#include <ATen/ops/gelu.h>

namespace phalanx::nn {

Mlp::Mlp(std::int64_t dim, std::int64_t hidden, TensorOptionsOfModule tensor) : Positionwise("Mlp") {
  w1 = register_module("w1", std::make_shared<Linear>(LinearOptions{dim, hidden, true}, tensor));
  w2 = register_module("w2", std::make_shared<Linear>(LinearOptions{hidden, dim, true}, tensor));
}

at::Tensor Mlp::forward(const at::Tensor& x) { return call(w2, at::gelu(call(w1, x), "tanh")); }

}  // namespace phalanx::nn
