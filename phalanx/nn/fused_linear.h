// FusedLinear: several linear layers with the same input as one product: [q; k; v], [gate; up].
//
//   FusedLinear wqkv(dim, {{"q", 512}, {"k", 128}, {"v", 128}});
//   const auto qkv = wqkv.parts(call(wqkv, x));              // [..., 512], [..., 128], [..., 128]
//
// Each part is a separate parameter, "wqkv.q", with its own box, gradient and entry in a checkpoint. So a rank may hold
// some rows of each (ColwiseParallel of parallel/tensor/styles.h), and a checkpoint fits any number of ranks. A part's
// bias, if it has one, is "wqkv.q_bias" and starts as zeros. The parts are adjacent in one storage. share_storage()
// restores this after other code has replaced their storage. If they are not adjacent (a sharded unit may have
// gaps), they are concatenated for the product.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/nn/collective_matmul.h"
#include "phalanx/nn/module.h"

namespace phalanx::nn {

struct FusedPart {
  std::string name;
  std::int64_t rows = 0;
  bool bias = false;
  std::string bias_name() const { return name + "_bias"; }
};

class FusedLinear : public Module {
 public:
  /// ConfigError for no parts, a part without rows, or two of one name.
  FusedLinear(std::int64_t in_features, std::vector<FusedPart> parts, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x);  // [..., in] -> [..., rows of all parts that this rank holds]
  /// Cuts forward()'s result (or another tensor with these columns) into the parts: views.
  std::vector<at::Tensor> parts(const at::Tensor& y) const;

  const std::vector<FusedPart>& part_list() const noexcept { return list_; }
  at::Tensor weight(const std::string& part) const;
  std::vector<std::vector<at::Tensor>> one_products() const override { return {weights_}; }
  /// From now on the products use all ranks' rows.
  void set_all_gather_matmul(std::shared_ptr<const CollectiveMatmul> exchange) { gathers_ = std::move(exchange); }

 private:
  std::vector<FusedPart> list_;
  std::vector<at::Tensor> weights_;
  std::vector<at::Tensor> biases_;  // undefined where a part has none
  std::shared_ptr<const CollectiveMatmul> gathers_;
};

}  // namespace phalanx::nn
