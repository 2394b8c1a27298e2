// The norm in front of attention, of the feed-forward net and of the output: RMSNorm or LayerNorm, over the last
// dimension.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "phalanx/nn/module.h"

namespace phalanx::nn {

class Norm : public Module {
 public:
  virtual at::Tensor forward(const at::Tensor& x) = 0;  // [..., dim]

  double eps() const noexcept { return eps_; }

  at::Tensor weight;  // [dim], starts as ones, or as zeros if 1 is added to it

 protected:
  Norm(const std::string& name, std::int64_t dim, double eps, TensorOptionsOfModule tensor, double start = 1.0)
      : Module(name), weight(make_parameter("weight", {dim}, tensor, Init::constant(start))), eps_(eps) {}

 private:
  double eps_;
};

/// rms_one_plus: RMSNorm that multiplies by 1 + weight, which starts as zeros.
enum class NormKind : std::uint8_t { rms, layer, rms_one_plus };
std::shared_ptr<Norm> make_norm(NormKind kind, std::int64_t dim, double eps, TensorOptionsOfModule tensor = {});

}  // namespace phalanx::nn
