// Work that rank 0 does for all.
//
//   on_first_rank(*world, [&] { make_folder(); });      // collective
#pragma once

#include <functional>

#include "phalanx/comm/communicator.h"

namespace phalanx::train {

/// What fails there is the same error on every rank, not a peer that was lost.
void on_first_rank(Communicator& world, const std::function<void()>& work);

}  // namespace phalanx::train
