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

  /// From now on the product is computed through it: of all ranks' rows, or each rank's rows of the sum.
  void set_all_gather_matmul(std::shared_ptr<const CollectiveMatmul> exchange) { gathers_ = std::move(exchange); }
  void set_matmul_reduce_scatter(std::shared_ptr<const CollectiveMatmul> exchange) { scatters_ = std::move(exchange); }
  /// What forward() uses for the weight, for a layer that multiplies with it in its place.
  at::Tensor used_weight() const { return used("weight", weight); }
  at::Tensor used_bias() const { return used("bias", bias); }  // undefined without one
  /// Whether somebody wants to see this layer's own call.
  bool must_be_called() const { return has_forward_hooks() || has_input_hook() || has_parameter_hooks(); }

  at::Tensor weight;
  at::Tensor bias;  // undefined without a bias

 private:
  LinearOptions options_;
  std::shared_ptr<const CollectiveMatmul> gathers_, scatters_;
};

}  // namespace phalanx::nn
