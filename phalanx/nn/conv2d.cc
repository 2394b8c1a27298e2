#include "phalanx/nn/conv2d.h"

#include <ATen/ops/conv2d.h>

#include <cmath>

namespace phalanx::nn {

Conv2d::Conv2d(const Conv2dOptions& options, TensorOptionsOfModule tensor)
    : Module("Conv2d"), padding_(options.padding) {
  const std::int64_t k = options.kernel;
  const double bound = 1.0 / std::sqrt(static_cast<double>(options.in_channels * k * k));
  const Init init = Init::uniform(-bound, bound);
  weight = make_parameter("weight", {options.out_channels, options.in_channels, k, k}, tensor, init);
  bias = make_parameter("bias", {options.out_channels}, tensor, init);
}

at::Tensor Conv2d::forward(const at::Tensor& x) {
  return at::conv2d(x, weight, bias, /*stride=*/{1, 1}, /*padding=*/{padding_, padding_});
}

}  // namespace phalanx::nn
