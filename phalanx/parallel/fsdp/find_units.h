// Finds which parameters of a module form which unit, and registers hooks around the uses of each unit. fully_shard.h
// has the rules.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/tensor/named.h"

namespace phalanx::fsdp {

/// Called around every use of a unit: `before` runs before it, `after` receives its output, which may be hooked or
/// replaced. `input`, if set, converts its first input.
struct ForwardHooks {
  std::function<void()> before;
  std::function<at::Tensor(at::Tensor)> after;
  std::function<at::Tensor(const at::Tensor&)> input = nullptr;
};
using RegisterHooks = std::function<void(ForwardHooks)>;

struct ParamGroupPlan {
  std::string name;
  std::vector<NamedTensor> parameters;
  /// Attaches hooks to the modules of the unit, in the order of use. Empty: the code that runs the whole module has to
  /// call the hooks itself.
  std::vector<RegisterHooks> uses;
  bool on_use = false;        // no hooks: to be gathered by the first operator that reads it
  bool can_be_split = false;  // on_use: the unit is one module with parameters of its children
  bool is_root = false;       // used by several units, or by none: stays unsharded
  int levels = 1;             // nesting depth: this unit and those that contain it
};

/// Puts every parameter into exactly one unit: the innermost named unit around it. A unit that contains others holds
/// the parameters that remain. Units without parameters are left out. The result is in the order of use, as far as the
/// module declares it. Neighbours are joined until each has `smallest` elements. With `on_use`, plain modules that
/// nothing hooks become units, too: whole members of numbered lists, and otherwise the own parameters of any module.
std::vector<ParamGroupPlan> find_units(torch::nn::Module& module, std::int64_t smallest, bool on_use = false);

/// Attaches a hook to the output of the whole module. Returns false if the moment of that output cannot be known: the
/// module is neither a phalanx::nn::Module nor a Sequential.
bool attach_to_output(torch::nn::Module& module, std::function<at::Tensor(at::Tensor)> after);

}  // namespace phalanx::fsdp
