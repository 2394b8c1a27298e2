// Which parameters of a module make up which unit, and which of its modules use them. See fully_shard.h for the rules.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "phalanx/nn/module.h"
#include "phalanx/tensor/named.h"

namespace phalanx::fsdp {

struct UnitPlan {
  std::string name;
  std::vector<NamedTensor> parameters;
  /// Gathered before the first is run, let go after the last; in the order of use. Empty: whoever runs the module.
  std::vector<nn::Module*> modules;
  bool is_root = false;  // used by several units, or by none: stays gathered
};

/// Every parameter is in exactly one unit; units without parameters are left out. Units are in the order of use as far
/// as the module says.
std::vector<UnitPlan> find_units(torch::nn::Module& module);

}  // namespace phalanx::fsdp
