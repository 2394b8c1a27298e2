// Where a layout goes wrong, once it is known that it does: the step's forward and backward passes are run again, with
// a look at what goes from module to module.
//
// What one wrong value spoils is everything behind it: in a forward pass all gradients. So the first parameter of a
// list says little. Here the two sides are compared in the order of the forward pass: the tokens, then for each module
// its input and the weight that it uses (gathered, where it is sharded); then the weights as the backward pass has
// them. The first that differs is named by the parameter that it comes from:
//
//   weight   what the pass uses as that parameter: it was gathered wrongly, or not when it should have been
//   input    what that layer's matrix is given, though what was to be brought together for it is right
//   output   what that layer hands on, though its input and weight are right
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/verify/layout_side.h"
#include "phalanx/verify/tensor_difference.h"

namespace phalanx::train {

struct LayoutOrigin {
  std::string what;       // "batch", "input", "output", "weight in use", "weight in use by the backward pass"
  std::string parameter;  // empty: of the batch
  int rank = 0;
  TensorDifference difference;
  double tolerance = 0;
  std::string cause;
};

struct LayoutPath {
  std::optional<LayoutOrigin> origin;   // nothing: all of that is right
  std::vector<std::string> parameters;  // in the order in which the forward pass uses them
};

struct LayoutPathOptions {
  std::int64_t step = 0;        // from 0
  double weight_tolerance = 0;  // relative to the norm
  double activation_tolerance = 0;
  std::map<std::string, at::Tensor> weights_before = {};  // with the reference: those of the step before
};

/// Collective over the world, whose rank 0 has the reference. Gradients are lost, and neither side may be used after.
LayoutPath find_origin(LayoutSide& parallelized, LayoutSide* reference, Communicator& world,
                       const LayoutPathOptions& options);

}  // namespace phalanx::train
