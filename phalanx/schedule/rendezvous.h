// Runs the transfers of a schedule where a send and its receive must meet: for validate().
//
// Transfers that stand next to each other in a rank's list start together (a batch of isend and irecv); the rank goes
// on when each has met its other end, which must be started, too. Passes take no time: what they need has been
// received.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "phalanx/schedule/schedule.h"

namespace phalanx::schedule {

struct Rendezvous {
  std::vector<std::size_t> ran;                    // by rank: how many actions; a batch counts when it is complete
  std::vector<std::optional<Action>> waiting_for;  // by rank: the first other end that does not come
};

Rendezvous meet(const Schedule& schedule);

}  // namespace phalanx::schedule
