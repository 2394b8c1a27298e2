// Which parameters of a module make up which unit, and how to be called when they are used. See fully_shard.h for the
// rules.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/tensor/named.h"

namespace phalanx::fsdp {

/// Called around every use of something: before it, and with what it has computed, which may be hooked or replaced.
/// `input`, if set, makes its first input what it is to be.
struct ForwardHooks {
  std::function<void()> before;
  std::function<at::Tensor(at::Tensor)> after;
  std::function<at::Tensor(const at::Tensor&)> input = nullptr;
};
using RegisterHooks = std::function<void(ForwardHooks)>;

struct ParamGroupPlan {
  std::string name;
  std::vector<NamedTensor> parameters;
  /// Attaches to the modules of the unit in the order of use. Empty: whoever runs the whole module has to call.
  std::vector<RegisterHooks> uses;
  bool is_root = false;  // used by several units, or by none: stays gathered
  int levels = 1;        // units around each other here, this one and those it lies in
};

/// Every parameter is in exactly one unit: the innermost that is named around it, the rest of a unit with others inside
/// being that unit's. Units without parameters are left out. They are in the order of use as far
/// as the module says; neighbours are joined until each has `smallest` elements.
std::vector<ParamGroupPlan> find_units(torch::nn::Module& module, std::int64_t smallest);

/// Attaches to the output of the whole module. False where nothing says when that is there: a module that is neither
/// one of ours nor a Sequential.
bool attach_to_output(torch::nn::Module& module, std::function<at::Tensor(at::Tensor)> after);

}  // namespace phalanx::fsdp
