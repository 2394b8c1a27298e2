// Guesses why a value is wrong: it compares what a rank has with what it would have after each of several faults.
//
// The faults: nothing arrived (zero); scaled (counted twice, not divided by a number of ranks, divided once too often);
// the value of the previous step; another rank's part, or parts in another order; not summed or averaged over an axis;
// some elements damaged, all others right.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/tensor/named.h"

namespace phalanx::verify {

/// The value of one rank, on the host in float64.
struct SuspectValue {
  at::Tensor found;                                     // undefined if this rank has no part of it
  at::Tensor expected;                                  // of the same shape
  at::Tensor before;                                    // the value of the previous step; may be undefined
  std::string part;                                     // ranks that should have the same value have the same text
  std::vector<std::pair<int, at::Tensor>> others = {};  // what other ranks should have, by rank
};

/// The part of a full value that a shard describes; null: all of it.
at::Tensor part_of(const at::Tensor& whole, const Shard* shard);

/// Whether two values are equal except for rounding.
bool is_same_value(const at::Tensor& a, const at::Tensor& b);

/// Compares `found` with the shard's part of `whole`, and of `before` if it is defined.
SuspectValue suspect_part(const at::Tensor& found, const at::Tensor& whole, const at::Tensor& before,
                          const Shard* shard);

/// Collective over the mesh and over `world`, which have the same ranks. Every rank passes its own part of the same
/// value. Returns, on every rank, the guess for the world's rank `of`; empty: no fault explains the value.
std::string likely_cause(const SuspectValue& value, const DeviceMesh& mesh, Communicator& world, int of);

}  // namespace phalanx::verify
