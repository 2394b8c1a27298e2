// y = x W^T + b, with W of shape [out_features, in_features].
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "phalanx/kernels/float8_linear.h"
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
  /// From now on the product is one of float8 numbers (kernels/float8_linear.h).
  using Float8 = std::shared_ptr<const kernels::Float8LinearOptions>;
  void set_float8(Float8 how) { float8_ = std::move(how); }
  const Float8& float8() const noexcept { return float8_; }  // null: it is not
  /// The tensor that forward() uses as the weight, for a layer that multiplies with it itself.
  at::Tensor used_weight() const { return used("weight", weight); }
  at::Tensor used_bias() const { return used("bias", bias); }  // undefined without one
  /// Whether forward() is the product with the weight and nothing else: in the activations' type, or in float8.
  bool is_plain() const { return is_product() && !float8_; }
  bool is_plain_float8() const { return is_product() && float8_; }
  /// Whether this layer's own call must happen, because it has hooks.
  bool must_be_called() const { return has_forward_hooks() || has_input_hook() || has_parameter_hooks(); }

  at::Tensor weight;
  at::Tensor bias;  // undefined without a bias

 private:
  bool is_product() const { return !bias.defined() && !gathers_ && !scatters_ && !has_runner(); }
  at::Tensor forward_in_float8(const at::Tensor& x) const;

  LinearOptions options_;
  std::shared_ptr<const CollectiveMatmul> gathers_, scatters_;
  Float8 float8_;
};

/// Whether these layers are one product of float8 numbers with a shared input.
template <class... Others>
bool share_float8(const Linear& first, const Others&... others) {
  return first.is_plain_float8() && ((others.is_plain_float8() && others.float8() == first.float8()) && ...);
}

}  // namespace phalanx::nn
