// Finds where a layout goes wrong, once it is known to be wrong. It runs the step's forward and backward passes again
// and looks at what passes from module to module.
//
// A wrong value spoils everything after it: in a forward pass, all gradients. So the first parameter of a list says
// little. This search compares the two sides in the order of the forward pass: the tokens, then for each module its
// input and the weight that it uses (unsharded, if it is sharded), then the weights as the backward pass has them. The
// first difference is named by the parameter that it comes from:
//
//   weight   what the pass uses as that parameter: it was gathered wrongly, or not when it should have been
//   input    the input of that layer's matrix, although the tensors it is made from are right
//   output   the output of that layer, although its input and weight are right
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/verify/layout_side.h"
#include "phalanx/verify/tensor_difference.h"

namespace phalanx::verify {

struct LayoutOrigin {
  std::string what;       // "batch", "input", "output", "weight in use", "weight in use by the backward pass"
  std::string parameter;  // empty if `what` is "batch"
  int rank = 0;
  TensorDifference difference;
  double tolerance = 0;
  std::string cause;
};

struct LayoutPath {
  std::optional<LayoutOrigin> origin;   // nothing: everything compared is right
  std::vector<std::string> parameters;  // in the order in which the forward pass uses them
};

struct LayoutPathOptions {
  std::int64_t step = 0;        // from 0
  double weight_tolerance = 0;  // relative to the norm
  double activation_tolerance = 0;
  std::map<std::string, at::Tensor> weights_before = {};  // on the rank with the reference: those of the previous step
};

/// Collective over the world, whose rank 0 has the reference.
/// ENSURES: the gradients are lost. Neither side may be used afterwards.
LayoutPath find_origin(LayoutSide& parallelized, LayoutSide* reference, Communicator& world,
                       const LayoutPathOptions& options);

}  // namespace phalanx::verify
