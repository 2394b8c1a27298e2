// y = x W^T + b, with W of shape [out_features, in_features].
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "phalanx/nn/collective_matmul.h"
#include "phalanx/nn/module.h"

namespace phalanx::nn {

struct LinearOptions {
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  bool bias = false;
};

class Linear : public Module {
 public:
  explicit Linear(const LinearOptions& options, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., out]

  const LinearOptions& options() const noexcept { return options_; }

  /// From now on the product is computed through it: with all ranks' rows, or as each rank's rows of the sum.
  void set_all_gather_matmul(std::shared_ptr<const CollectiveMatmul> exchange) { gathers_ = std::move(exchange); }
  void set_matmul_reduce_scatter(std::shared_ptr<const CollectiveMatmul> exchange) { scatters_ = std::move(exchange); }
  /// The tensor that forward() uses as the weight, for a layer that multiplies with it itself.
  at::Tensor used_weight() const { return used("weight", weight); }
  at::Tensor used_bias() const { return used("bias", bias); }  // undefined without one
  /// Whether forward() is the product with the weight and nothing else.
  bool is_plain() const { return !bias.defined() && !gathers_ && !scatters_ && !has_runner(); }
  /// Whether this layer's own call must happen, because it has hooks.
  bool must_be_called() const { return has_forward_hooks() || has_input_hook() || has_parameter_hooks(); }

  at::Tensor weight;
  at::Tensor bias;  // undefined without a bias

 private:
  LinearOptions options_;
  std::shared_ptr<const CollectiveMatmul> gathers_, scatters_;
};

}  // namespace phalanx::nn
