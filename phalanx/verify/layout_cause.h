// Why a value may be wrong: compares what a rank has with what it would have, had this or that gone wrong.
//
// The guesses: nothing arrived (zero); scaled (counted twice, not divided by a number of ranks, divided once too
// often); the value of the step before; another rank's part, or parts in another order; not summed or averaged over an
// axis; some elements damaged, all others right.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/tensor/named.h"

namespace phalanx::train {

/// Of one rank, on the host in float64.
struct SuspectValue {
  at::Tensor found;                                     // undefined where this rank has nothing of it
  at::Tensor expected;                                  // of the same shape
  at::Tensor before;                                    // that of the step before; may be undefined
  std::string part;                                     // ranks that should have the same have the same text
  std::vector<std::pair<int, at::Tensor>> others = {};  // what other ranks should have, by rank
};

/// The part of a whole value that a shard is; null: all of it.
at::Tensor part_of(const at::Tensor& whole, const Shard* shard);

/// Whether two values are equal but for rounding.
bool is_same_value(const at::Tensor& a, const at::Tensor& b);

/// `found` beside parts of `whole`, and of `before` where it is defined.
SuspectValue suspect_part(const at::Tensor& found, const at::Tensor& whole, const at::Tensor& before,
                          const Shard* shard);

/// Collective over the mesh and over `world`, which are the same ranks: every rank with its own part of the same value.
/// Returns the guess of the world's rank `of` on every rank; empty: none of these explains it.
std::string likely_cause(const SuspectValue& value, const DeviceMesh& mesh, Communicator& world, int of);

}  // namespace phalanx::train
