// Convolution over images, stride 1, with a bias, for the small nets of models/.
//
// Initialised as torch does it: weight and bias uniform within 1 / sqrt(in_channels * kernel^2).
#pragma once

#include <cstdint>

#include "phalanx/nn/module.h"

namespace phalanx::nn {

struct Conv2dOptions {
  std::int64_t in_channels = 0;
  std::int64_t out_channels = 0;
  std::int64_t kernel = 3;  // height and width
  std::int64_t padding = 0;
};

class Conv2d : public Module {
 public:
  explicit Conv2d(const Conv2dOptions& options, TensorOptionsOfModule tensor = {});

  at::Tensor forward(const at::Tensor& x);  // [batch, in, h, w] -> [batch, out, h + 2 padding - kernel + 1, likewise]

  at::Tensor weight;  // [out, in, kernel, kernel]
  at::Tensor bias;    // [out]

 private:
  std::int64_t padding_;
};

}  // namespace phalanx::nn
