// What an operator's schema says about running it on a device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace phalanx::sim_device {

struct OperatorTraits {
  static constexpr int kNew = -1;

  std::string name;           // "aten::add.Tensor"
  std::vector<bool> writes;   // by argument
  std::vector<int> returned;  // by result: which argument it is, or kNew
  int generator = -1;         // the argument that is a generator; -1: none
  bool is_view = false;       // results are views of the first argument
  bool makes_new = false;     // some result is new
  bool writes_out = false;    // an out= variant: it resizes empty results
  bool reads_data = false;    // shapes of results depend on data, or a result is no tensor
  bool has_meta = false;      // shapes can be inferred on meta tensors
  bool has_tensor_input = false;
};

/// Lives until the process ends.
const OperatorTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace phalanx::sim_device
