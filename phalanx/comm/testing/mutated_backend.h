// A backend that gives wrong results on purpose, to see that somebody notices.
//
//   const auto broken = mutated(world, {.kind = MutationKind::doubled, .verb = Verb::all_reduce, .group = "dp_shard"});
//   check_layout(config, {.world = broken});                        // must find something
//
// What moves is right, and no rank waits for another one in vain: only what a rank reads of the result is changed,
// right when the operation is done. Operations of fewer than `least_elements` and of other types than f32 are left
// alone, so that what ranks agree upon (losses, names, norms) stays right.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "phalanx/comm/communicator.h"

namespace phalanx {

enum class MutationKind : std::uint8_t {
  dropped,  // the result is what the output held before: for an all_reduce the rank's own addend
  doubled,
  halved,
  stale,    // the result of the operation before of this kind
  swapped,  // the first and the last rank's parts change places (all_gather), or the halves of the result
  one_off,  // one element in the middle is one too large
  zeroed
};

struct Mutation {
  MutationKind kind = MutationKind::dropped;
  Verb verb = Verb::all_reduce;
  std::string group;                 // of communicators of this name alone; empty: of all
  int rank = -1;                     // in that group; -1: on every rank
  std::int64_t least_elements = 17;  // of the result
  std::int64_t only_elements = 0;    // of the result; 0: any number
};

/// A communicator over the same ranks and, until it is gone, in place of `world`; what it is split into is mutated,
/// too. Host memory only. Not collective, but all ranks make one.
std::shared_ptr<Communicator> mutated(const std::shared_ptr<Communicator>& world, Mutation mutation);

}  // namespace phalanx
