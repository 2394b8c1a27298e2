// Sums the gradients of several small parameters over a group in one collective instead of one each.
//
// A norm that sees only some of the positions computes an addend of its weight's gradient: a few hundred numbers. The
// cost of summing them is the synchronisation of the ranks. With this, the two norms of a transformer layer synchronise
// only once.
//
//   coalesce_all_reduces(layer, {{attention_norm, "weight"}, {ffn_norm, "weight"}}, tp);
//
// When `parent`'s forward pass begins, one autograd node takes all the parameters. The modules then use its outputs in
// place of the parameters (Module::set_parameter_use). The node's backward pass runs when the last of these outputs has
// its gradient: after the backward pass of the parameter that was used first, and before the parameters' own
// accumulation. So grad_ready fires when the sum is there. If a module is used outside the parent's forward pass, its
// parameter is summed by itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "phalanx/nn/module.h"

namespace phalanx {

class Communicator;

struct CoalescedParameter {
  nn::Module* module = nullptr;
  std::string name;  // name of the module's own parameter
};

/// REQUIRES: the modules are inside `parent` and live as long as it does. All parameters have one dtype.
void coalesce_all_reduces(nn::Module& parent, const std::vector<CoalescedParameter>& parameters,
                          const std::shared_ptr<Communicator>& group);

}  // namespace phalanx
