// A weight with an offered gradient buffer, for the tests of layers that write their gradient there.
#pragma once

#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <vector>

#include "phalanx/tensor/grad_ready.h"

namespace phalanx::grad_buffer_testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline at::Tensor parameter(std::vector<std::int64_t> shape) {
  return at::randn(shape, at::kFloat).set_requires_grad(true);
}

// A weight with a buffer, and the count of its events. The buffer's previous contents must not matter, so they are NaN.
struct Buffered {
  explicit Buffered(std::vector<std::int64_t> shape) : Buffered(at::randn(shape, at::kFloat)) {}
  explicit Buffered(const at::Tensor& value) : weight(value.detach().clone().set_requires_grad(true)) {
    buffer = at::full_like(weight, kNan).set_requires_grad(false);
    subscription = on_grad_ready(weight, [this](const at::Tensor&) { ++events; });
    set_grad_buffer(weight, buffer);
  }
  bool is_in_buffer() const { return weight.grad().defined() && weight.grad().is_same(buffer); }

  at::Tensor weight, buffer;
  int events = 0;
  GradReadySubscription subscription;
};

inline at::Tensor gradient(const at::Tensor& loss, const at::Tensor& of) {
  return torch::autograd::grad({loss}, {of}, {}, /*retain_graph=*/true)[0];
}

}  // namespace phalanx::grad_buffer_testing
