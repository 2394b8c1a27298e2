// The shapes of an operator's new results, found without the data: by running it on meta tensors, once for each
// signature (operator, shapes, strides, dtypes, numbers). Where an operator has no meta kernel, it runs once on zeros.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <vector>

#include "phalanx/testing/sim_device/torch/operator_traits.h"

namespace phalanx::sim_device {

struct TensorShape {
  bool is_defined = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
};

struct ResultShape {
  bool is_list = false;
  std::vector<TensorShape> tensors;  // one, unless it is a list
};

/// One entry for each result, also for those that are arguments. Any thread may call.
std::shared_ptr<const std::vector<ResultShape>> output_shapes(const c10::OperatorHandle& op,
                                                              const OperatorTraits& traits,
                                                              const torch::jit::Stack& arguments);

}  // namespace phalanx::sim_device
