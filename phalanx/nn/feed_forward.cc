#include "phalanx/nn/feed_forward.h"

#include "phalanx/kernels/swiglu_feed_forward.h"

namespace phalanx::nn {

FeedForward::FeedForward(std::int64_t dim, std::int64_t hidden, TensorOptionsOfModule tensor)
    : Positionwise("FeedForward") {
  w1 = register_module("w1", std::make_shared<Linear>(LinearOptions{dim, hidden}, tensor));
  w2 = register_module("w2", std::make_shared<Linear>(LinearOptions{hidden, dim}, tensor));
  w3 = register_module("w3", std::make_shared<Linear>(LinearOptions{dim, hidden}, tensor));
}

at::Tensor FeedForward::forward(const at::Tensor& x) {
  // A hook on a projection must see its call, so the projections are then not fused, and neither if one has an adapter. The last projection's output is
  // the same as the fused kernel's.
  const auto is_called = [](const Linear& projection) {
    return projection.has_forward_hooks() || projection.has_input_hook() || projection.has_parameter_uses() ||
           projection.has_adapter();
  };
  if (is_called(*w1) || is_called(*w2) || is_called(*w3) || w1->has_parameter_hooks() || w3->has_parameter_hooks()) {
    const at::Tensor all = collective_matmul_ ? collective_matmul_->gather(x) : x;
    const at::Tensor y = call(w2, kernels::swiglu(call(w1, all), call(w3, all)));
    return collective_matmul_ ? collective_matmul_->scatter(y) : y;
  }
  return w2->around_use([&] {
    if (collective_matmul_) return collective_matmul_->feed_forward(x, w1->weight, w2->weight, w3->weight);
    return kernels::swiglu_feed_forward(x, w1->weight, w2->weight, w3->weight);
  });
}

}  // namespace phalanx::nn
