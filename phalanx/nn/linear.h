// y = x W^T + b, with W of shape [out_features, in_features].
#pragma once

#include <cstdint>

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

  at::Tensor weight;
  at::Tensor bias;  // undefined without a bias

 private:
  LinearOptions options_;
};

}  // namespace phalanx::nn
