#include "phalanx/nn/feed_forward.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>

#include "phalanx/kernels/clamped_swiglu.h"
#include "phalanx/kernels/float8_linear.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/swiglu_feed_forward.h"

namespace phalanx::nn {

FeedForward::FeedForward(std::int64_t dim, std::int64_t hidden, TensorOptionsOfModule tensor,
                         const FeedForwardOptions& options)
    : Positionwise("FeedForward"), options_(options) {
  const bool bias = options.bias;
  w1 = register_module("w1", std::make_shared<Linear>(LinearOptions{dim, hidden, bias}, tensor));
  w2 = register_module("w2", std::make_shared<Linear>(LinearOptions{hidden, dim, bias}, tensor));
  w3 = register_module("w3", std::make_shared<Linear>(LinearOptions{dim, hidden, bias}, tensor));
  share_storage();
}

std::vector<std::vector<at::Tensor>> FeedForward::one_products() const {
  if (w1->weight.device().is_cpu()) return {};
  return {{w1->weight, w3->weight}};
}

at::Tensor FeedForward::gated(const at::Tensor& gate, const at::Tensor& up) const {
  switch (options_.activation) {
    case GatedActivation::gelu_tanh:
      return at::gelu(gate, "tanh") * up;
    case GatedActivation::clamped_silu:
      return kernels::clamped_swiglu(gate, up, options_.limit);
    default:
      return kernels::swiglu(gate, up);
  }
}

// Of its projections some or all are products of float8 numbers, or have biases, or the activation is not that of the
// fused function.
at::Tensor FeedForward::forward_layer_by_layer(const at::Tensor& x) {
  // As the fused function, it saves none of its activations for a second run.
  const kernels::SavedActivations::Scope nothing(nullptr, kernels::SavedActivations::Run::forward);
  const at::Tensor all = collective_matmul_ ? collective_matmul_->gather(x) : x;
  at::Tensor gate, up;
  if (share_float8(*w1, *w3)) {
    const auto both = kernels::float8_linears(all, {w1->used_weight(), w3->used_weight()}, w1->float8());
    gate = both[0], up = both[1];
  } else {
    gate = w1->forward(all), up = w3->forward(all);
  }
  const at::Tensor y = w2->forward(gated(gate, up));
  return collective_matmul_ ? collective_matmul_->scatter(y) : y;
}

// A hook on a projection must see its call, so the projections are then not fused, and neither if one has an adapter or
// a weight in another type. The last projection's output is the same as the fused kernel's.
bool FeedForward::calls_its_layers() const {
  const auto is_called = [](const Linear& projection) {
    return projection.has_forward_hooks() || projection.has_input_hook() || projection.has_parameter_uses() ||
           projection.has_own_product();
  };
  return is_called(*w1) || is_called(*w2) || is_called(*w3) || w1->has_parameter_hooks() || w3->has_parameter_hooks();
}

bool FeedForward::is_plain_swiglu() const {
  const bool is_silu = options_.activation == GatedActivation::silu && !options_.bias;
  const bool has_float8 = w1->float8() || w2->float8() || w3->float8();
  const bool has_hooks = has_forward_hooks() || has_input_hook() || has_parameter_hooks() || has_runner();
  return is_silu && !has_float8 && !has_hooks && !calls_its_layers() && !w2->has_parameter_hooks() &&
         !collective_matmul_;
}

at::Tensor FeedForward::forward(const at::Tensor& x) {
  if (calls_its_layers()) {
    const at::Tensor all = collective_matmul_ ? collective_matmul_->gather(x) : x;
    const at::Tensor y = call(w2, gated(call(w1, all), call(w3, all)));
    return collective_matmul_ ? collective_matmul_->scatter(y) : y;
  }
  const bool is_fused = options_.activation == GatedActivation::silu && !options_.bias;
  if (w1->float8() || w2->float8() || w3->float8() || !is_fused) {
    return w2->around_use([&] { return forward_layer_by_layer(x); });
  }
  return w2->around_use([&] {
    if (collective_matmul_) return collective_matmul_->feed_forward(x, w1->weight, w2->weight, w3->weight);
    return kernels::swiglu_feed_forward(x, w1->weight, w2->weight, w3->weight);
  });
}

}  // namespace phalanx::nn
