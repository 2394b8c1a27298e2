// A product of low rank that is added to another one, as that of an adapter (LoRA) is:
//
//   y = x W^T + low.x low.weight^T          low.x [..., rank], low.weight [out, rank]
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace phalanx::kernels {

struct LowRank {
  at::Tensor x, weight;  // both undefined: there is none

  bool defined() const { return x.defined(); }
  bool requires_grad() const { return defined() && (x.requires_grad() || weight.requires_grad()); }
  /// With x converted, visible to autograd.
  LowRank to(at::ScalarType type) const { return defined() ? LowRank{x.to(type), weight} : LowRank(); }
  /// y + x weight^T, in y's memory. REQUIRES: nobody else uses y.
  at::Tensor added_to(at::Tensor y) const;
};

/// For a function that computes its product some rows at a time, with gradients in the forward pass.
class LowRankRows {
 public:
  LowRankRows() = default;
  /// Both or neither have a value. The products are in x's type; the weight may have another, which its gradient has.
  /// Gradients are made for what requires them, if `records`.
  LowRankRows(const std::optional<at::Tensor>& x, const std::optional<at::Tensor>& weight, bool records);

  /// Adds the rows from `from` on to `out`, as many as it has. Does nothing without a value.
  void add_to(const at::Tensor& out, std::int64_t from) const;
  /// Given the gradient of these rows of the sum. Each row once.
  void add_gradients(const at::Tensor& dout, std::int64_t from);

  struct Gradients {
    at::Tensor x, weight;  // what backward() returns for them
  };
  /// Those of all rows, times a factor: a number, or a scalar on the device.
  /// REQUIRES: called inside a backward function, and only once.
  Gradients deliver(float factor);
  Gradients deliver(const at::Tensor& factor);

 private:
  Gradients delivered();

  at::Tensor x_, weight_;  // [rows, rank], [out, rank]
  at::Tensor used_;        // the weight in x's type
  at::Tensor dx_;          // undefined if it is not needed
  at::Tensor dweight_;     // likewise, in fp32
  std::vector<std::int64_t> sizes_;
};

}  // namespace phalanx::kernels
