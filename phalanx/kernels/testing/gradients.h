// Shared by tests that compare a kernel's value and gradients with those of other operators.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace phalanx::kernels_testing {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

/// The value and the gradients of all inputs, computed in `type`, for a fixed gradient of the output.
inline Tensors value_and_gradients(const Function& function, const Tensors& inputs, at::ScalarType type) {
  Tensors leaves;
  for (const auto& input : inputs) leaves.push_back(input.detach().to(type).clone().requires_grad_());
  const at::Tensor y = function(leaves);
  // No element is 0, not even the first: a scalar's gradient would otherwise not be checked.
  const at::Tensor direction =
      at::arange(y.numel(), at::TensorOptions(at::kDouble)).mul(0.7).add(0.5).sin().view(y.sizes());
  y.backward(direction.to(type));
  Tensors result = {y.detach()};
  for (const auto& leaf : leaves) result.push_back(leaf.grad());
  return result;
}

/// Each tensor differs by at most `tolerance` of its norm.
inline void expect_close(const Tensors& got, const Tensors& expected, double tolerance) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double error = (got[i].to(at::kDouble) - expected[i].to(at::kDouble)).norm().item<double>();
    EXPECT_LE(error, tolerance * expected[i].to(at::kDouble).norm().item<double>()) << "tensor " << i;
  }
}

}  // namespace phalanx::kernels_testing
