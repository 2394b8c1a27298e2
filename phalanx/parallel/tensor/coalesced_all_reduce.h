// Gradients of several small parameters, summed over a group in one collective instead of one each.
//
// A norm that sees some of the positions has an addend of its weight's gradient, a few hundred numbers: what their sum
// costs is that the ranks meet for it. The two norms of a transformer layer meet once.
//
//   coalesce_all_reduces(layer, {{attention_norm, "weight"}, {ffn_norm, "weight"}}, tp);
//
// Whenever `parent`'s forward pass begins, one autograd node takes all the parameters; the modules then use its outputs
// in place of them (Module::set_parameter_use). Its backward pass runs when the last of these has its gradient, that is
// behind the first of them that was used, and before the parameters' own accumulation: so grad_ready comes when the sum
// is there. Where a module is used outside of the parent's forward pass, its parameter is summed by itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "phalanx/nn/module.h"

namespace phalanx {

class Communicator;

struct CoalescedParameter {
  nn::Module* module = nullptr;
  std::string name;  // of its own parameter
};

/// The modules are inside of `parent` and live as long. Parameters of one dtype.
void coalesce_all_reduces(nn::Module& parent, const std::vector<CoalescedParameter>& parameters,
                          const std::shared_ptr<Communicator>& group);

}  // namespace phalanx
