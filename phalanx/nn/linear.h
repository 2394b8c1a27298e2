// y = x W^T + b, with W of shape [out_features, in_features].
//
// With a low-rank adapter (LoRA), which add_adapter() adds before the model is sharded or gets values:
//
//   y = x W^T + b + scale (dropout(x) A^T) B^T        lora_A [rank, in_features], lora_B [out_features, rank]
//
// store_in_nf4() keeps the weight in 4 bits (kernels/nf4.h): `weight` then holds the codes [out, in / 2], and two more
// parameters the scales. All three are frozen, and cut as the weight would be.
//
// Code that multiplies with the weight itself has to call a layer with an adapter, or with a weight in fewer bits than
// the activations have, instead (must_be_called()).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "phalanx/kernels/float8_linear.h"
#include "phalanx/kernels/low_rank.h"
#include "phalanx/kernels/nf4.h"
#include "phalanx/nn/collective_matmul.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/nn/module.h"

namespace phalanx::nn {

struct LinearOptions {
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  bool bias = false;
  bool in_float32 = false;  // also under autocast, and of weights and inputs in 16 bits
};

struct AdapterOptions {
  std::int64_t rank = 8;
  double scale = 2.0;    // of what the adapter adds
  double dropout = 0.0;  // probability, of elements of the adapter's input
  Init b = Init::constant(0.0);
  std::optional<at::ScalarType> dtype = {};  // of A and B; unset: the weight's
};

class Linear : public Module {
 public:
  explicit Linear(const LinearOptions& options, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., out]

  const LinearOptions& options() const noexcept { return options_; }

  /// ConfigError unless the rank is 1 or more. Error if there is one already, or the layer is split over ranks.
  void add_adapter(const AdapterOptions& options);
  bool has_adapter() const noexcept { return lora_a.defined(); }
  /// What the adapter adds to y, for code that multiplies with the weight itself: scale (dropout(x) A^T) and B.
  /// Undefined without an adapter.
  kernels::LowRank low_rank(const at::Tensor& x);
  /// From now on the weight has another type than the activations, which it is converted to for each product.
  void set_narrow_weight() { narrow_weight_ = true; }
  /// From now on the weight is kept in 4 bits. Its values, if it has any, are lost. ConfigError, which begins with
  /// `name`, unless rows are whole blocks. Error if the layer is split over ranks.
  using Nf4Tables = std::shared_ptr<const kernels::Nf4Tables>;
  void store_in_nf4(const std::string& name, Nf4Tables tables);
  const Nf4Tables& nf4_tables() const noexcept { return nf4_tables_; }  // null: it is not
  /// The initial values of the weight as it would be if it were not in 4 bits.
  const Init& dense_init() const { return nf4_tables_ ? dense_init_ : init_of("weight"); }
  /// Whether its product is one of its own, which takes no part in fused or overlapped ones.
  bool has_own_product() const noexcept { return has_adapter() || narrow_weight_ || options_.in_float32; }
  const std::shared_ptr<Dropout>& adapter_dropout() const noexcept { return adapter_dropout_; }  // null: none

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
  /// Whether this layer's own call must happen, because it has hooks or a product of its own.
  bool must_be_called() const {
    return has_forward_hooks() || has_input_hook() || has_parameter_hooks() || has_own_product();
  }

  at::Tensor weight;
  at::Tensor bias;                          // undefined without a bias
  at::Tensor lora_a, lora_b;                // parameters "lora_A" and "lora_B"; undefined without an adapter
  at::Tensor weight_absmax, weight_nested;  // the scales of a weight in 4 bits: those of kernels::Nf4Weight

 private:
  at::Tensor adapted(const at::Tensor& y, const at::Tensor& x);
  bool is_product() const { return !bias.defined() && !gathers_ && !scatters_ && !has_runner() && !has_own_product(); }
  at::Tensor forward_in_float8(const at::Tensor& x) const;
  at::Tensor product_with_nf4(const at::Tensor& x) const;

  LinearOptions options_;
  double adapter_scale_ = 1.0;
  bool narrow_weight_ = false;
  Nf4Tables nf4_tables_;
  Init dense_init_;
  std::shared_ptr<Dropout> adapter_dropout_;
  std::shared_ptr<const CollectiveMatmul> gathers_, scatters_;
  Float8 float8_;
};

/// Whether these layers are one product of float8 numbers with a shared input.
template <class... Others>
bool share_float8(const Linear& first, const Others&... others) {
  return first.is_plain_float8() && ((others.is_plain_float8() && others.float8() == first.float8()) && ...);
}

}  // namespace phalanx::nn
