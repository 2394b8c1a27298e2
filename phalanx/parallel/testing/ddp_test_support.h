// Small modules and helpers shared by the tests of DistributedDataParallel. Plain torch::nn::Modules on purpose.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/parallel/ddp/ddp.h"

namespace phalanx::ddp_testing {

/// Distinct, reproducible values.
inline at::Tensor waves(at::IntArrayRef shape, double phase) {
  std::int64_t count = 1;
  for (const auto extent : shape) count *= extent;
  return at::sin(at::arange(count, at::kFloat).mul(0.61).add(phase)).view(shape);
}

/// tanh layers of equal width and a linear output of width 1.
struct Mlp : torch::nn::Module {
  explicit Mlp(int layers = 3, std::int64_t width = 8, double phase = 0.0) {
    for (int i = 0; i < layers; ++i) {
      const std::int64_t out = i + 1 == layers ? 1 : width;
      weights.push_back(register_parameter("w" + std::to_string(i), waves({out, width}, phase + i).mul(0.5)));
      biases.push_back(register_parameter("b" + std::to_string(i), waves({out}, phase + i + 0.5).mul(0.1)));
    }
  }
  at::Tensor forward(at::Tensor x) {  // [batch, width] -> [batch, 1]
    for (std::size_t i = 0; i < weights.size(); ++i) {
      x = at::linear(x, weights[i], biases[i]);
      if (i + 1 < weights.size()) x = at::tanh(x);
    }
    return x;
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) { return forward(x).sub(y).square().mean(); }
  std::vector<at::Tensor> weights, biases;
};

/// Parameters by name, nothing else; the test writes the loss.
struct Bag : torch::nn::Module {
  at::Tensor add(const std::string& name, const at::Tensor& value, bool requires_grad = true) {
    return register_parameter(name, value, requires_grad);
  }
  at::Tensor add_buffer(const std::string& name, const at::Tensor& value) { return register_buffer(name, value); }
};

/// The message of the Error that body throws; fails the test if it throws none.
inline std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected a phalanx::Error, got: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "expected an error";
  return "";
}

}  // namespace phalanx::ddp_testing
