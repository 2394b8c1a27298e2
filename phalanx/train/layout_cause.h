// Why a value may be wrong: compares what a rank has with what it would have, had this or that gone wrong.
//
// The guesses: nothing arrived (zero); scaled (counted twice, not divided by a number of ranks, divided once too
// often); the value of the step before; not summed or averaged over an axis; another rank's part.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

struct SuspectValue {
  NamedTensor found;    // what this rank has; its tensor is undefined where it has nothing of it
  at::Tensor expected;  // whole
  at::Tensor before;    // whole, of the step before; may be undefined
};

/// Collective over the mesh and over `world`, which are the same ranks: every rank with its own part of the same value.
/// Returns the guess of the world's rank `of` on every rank.
std::string likely_cause(const SuspectValue& value, const DeviceMesh& mesh, Communicator& world, int of);

}  // namespace phalanx::train
