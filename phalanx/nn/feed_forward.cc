#include "phalanx/nn/feed_forward.h"

#include "phalanx/kernels/swiglu.h"

namespace phalanx::nn {

FeedForward::FeedForward(std::int64_t dim, std::int64_t hidden, TensorOptionsOfModule tensor) : Module("FeedForward") {
  w1 = register_module("w1", std::make_shared<Linear>(LinearOptions{dim, hidden}, tensor));
  w2 = register_module("w2", std::make_shared<Linear>(LinearOptions{hidden, dim}, tensor));
  w3 = register_module("w3", std::make_shared<Linear>(LinearOptions{dim, hidden}, tensor));
}

at::Tensor FeedForward::forward(const at::Tensor& x) { return call(w2, kernels::swiglu(call(w1, x), call(w3, x))); }

}  // namespace phalanx::nn
